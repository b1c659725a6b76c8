// Keeps libmtmd from ending the process over a projector that somebody else has made: ggml asserts, follows null, or finds a
// type that it does not multiply in the middle of a step.
#include "kvf_projector.h"

#include "kvf.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace {

[[noreturn]] void refuse(const std::string & reason) {
    kvf_refuse(reason.c_str());
    throw std::runtime_error(reason);
}

bool is_float(const ggml_tensor * tensor) {
    return tensor->type == GGML_TYPE_F32 || tensor->type == GGML_TYPE_F16 || tensor->type == GGML_TYPE_BF16;
}

bool is_weight(const ggml_tensor * tensor) {
    return is_float(tensor) || (ggml_is_quantized(tensor->type) && tensor->type != GGML_TYPE_Q8_1 && tensor->type != GGML_TYPE_Q8_K);
}

bool turns(const ggml_tensor * node) {
    const int32_t * with     = node->op_params;  // as ggml_rope_impl writes them
    const int32_t   dims     = with[1];
    const int32_t   mode     = with[2];
    const int32_t * sections = with + 11;
    const int32_t   offset   = with[15];
    const int64_t   head     = node->src[0]->ne[0];
    if (dims < 2 || dims % 2 != 0 || offset < 0 || offset % 2 != 0 || offset + dims > head) {
        return false;
    }
    if (mode == GGML_ROPE_TYPE_VISION && (dims != head / 2 || offset != 0)) {
        return false;
    }
    return (mode & GGML_ROPE_TYPE_MROPE) == 0 || sections[0] > 0 || sections[1] > 0 || sections[2] > 0;
}

// What ggml's CPU backend asserts in a step, of the operations in libmtmd's graphs.
bool cpu_computes(const ggml_tensor * node) {
    const ggml_tensor * a   = node->src[0];
    const ggml_tensor * b   = node->src[1];
    const auto          f32 = [](const ggml_tensor * tensor) { return tensor == nullptr || tensor->type == GGML_TYPE_F32; };
    const auto          f16 = [](const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F16; };
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_CONCAT:
            return true;
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            return is_float(a) && (f32(b) || (b->type == a->type && node->type == a->type));
        case GGML_OP_DUP:
        case GGML_OP_CPY:
        case GGML_OP_CONT:
            return a->type == node->type || (is_float(a) && is_float(node)) || (f32(node) && is_weight(a)) ||
                   (f32(a) && node->type == GGML_TYPE_I32) || (a->type == GGML_TYPE_I32 && f32(node));
        case GGML_OP_REPEAT:
            return is_float(a) || a->type == GGML_TYPE_I16 || a->type == GGML_TYPE_I32;
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            return is_weight(a);
        case GGML_OP_GET_ROWS:
            return is_weight(a) || a->type == GGML_TYPE_I32;
        case GGML_OP_IM2COL:
            return (f32(node) && f32(b)) || (f16(node) && (f32(b) || f16(b)));
        case GGML_OP_CONV_2D:
        case GGML_OP_CONV_2D_DW:
        case GGML_OP_CONV_TRANSPOSE_1D:
            return (f32(a) || f16(a)) && f32(b);
        case GGML_OP_ROPE:
            return (f32(a) || f16(a)) && turns(node);
        case GGML_OP_FLASH_ATTN_EXT:
            return f32(a) && is_weight(b) && is_weight(node->src[2]);
        case GGML_OP_SOFT_MAX:
            return f32(a) && (b == nullptr || f32(b) || f16(b));
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_LOG:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_SUM:
        case GGML_OP_COL2IM_1D:
            return is_float(a);
        case GGML_OP_CLAMP:
        case GGML_OP_POOL_1D:
        case GGML_OP_POOL_2D:
        case GGML_OP_SET_ROWS:
            return f32(a) || f16(a);
        case GGML_OP_SCALE:
            return f32(a) || a->type == GGML_TYPE_BF16;
        case GGML_OP_FILL:
        case GGML_OP_ARANGE:
            return true;
        default:
            return f32(a) && f32(b);
    }
}

std::string described(const ggml_tensor * node) {
    std::string text = ggml_op_desc(node);
    for (int i = 0; i < GGML_MAX_SRC && node->src[i] != nullptr; i++) {
        const ggml_tensor * from = node->src[i];
        text += i == 0 ? " of " : ", ";
        text += from->name[0] == '\0' ? "a tensor" : from->name;
        text += std::string(" (") + ggml_type_name(from->type);
        for (int at = 0; at < ggml_n_dims(from); at++) {
            text += (at == 0 ? " " : "x") + std::to_string(from->ne[at]);
        }
        text += ")";
    }
    return text;
}

// The bytes that a view may read.
bool within(const ggml_tensor * view) {
    return ggml_is_empty(view) || view->view_offs + ggml_nbytes(view) <= ggml_nbytes(view->view_src);
}

// Do the rows that an input names lie in the tensor? Rows that the graph computes lie there.
bool has_rows(const ggml_tensor * node) {
    const ggml_tensor * from = node->op == GGML_OP_GET_ROWS ? node->src[0] : node;
    const ggml_tensor * rows = node->src[1];
    const ggml_tensor * root = rows->view_src == nullptr ? rows : rows->view_src;
    if ((root->flags & GGML_TENSOR_FLAG_INPUT) == 0 || root->type != GGML_TYPE_I32 || !ggml_is_contiguous(rows)) {
        return true;
    }
    std::vector<int32_t> named(ggml_nelements(rows));
    ggml_backend_tensor_get(root, named.data(), rows->view_offs, ggml_nbytes(rows));
    for (const int32_t row : named) {
        if (row < 0 || row >= from->ne[1]) {
            return false;
        }
    }
    return true;
}

}  // namespace

void kvf_missing_beside(const char * operation, const ggml_tensor * other) {
    if (other != nullptr && other->name[0] == '\0' && other->src[0] != nullptr) {
        other = other->src[0];  // the weight that the unnamed one was made with
    }
    const std::string place = other == nullptr || other->name[0] == '\0' ? "" : std::string(" beside ") + other->name;
    refuse(std::string("a tensor is missing in ") + operation + place);
}

void kvf_missing(const char * name) {
    refuse(std::string("a tensor is missing: ") + name);
}

void kvf_check_graph(ggml_cgraph * graph, ggml_backend_t backend, ggml_backend_t cpu, bool filled) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node  = ggml_graph_node(graph, i);
        const bool          there = node->view_src == nullptr || within(node);
        if (!there || (node->op == GGML_OP_FLASH_ATTN_EXT && ggml_is_empty(node->src[1])) ||
            ((backend == cpu || !ggml_backend_supports_op(backend, node)) && !cpu_computes(node))) {
            refuse("no device computes " + described(node));
        }
        const bool rows = node->op == GGML_OP_GET_ROWS || node->op == GGML_OP_SET_ROWS;
        if (filled && rows && !has_rows(node)) {
            refuse("there are fewer rows than an image needs, for " + described(node));
        }
    }
}
