// Shadows the operations of ggml in libmtmd's graphs. If a projector lacks a tensor they are given null, which ggml follows.
#pragma once

#include "kvf_projector.h"

#include <type_traits>

// An operation that throws unless its first n operands are there.
template <int n, typename Made, typename... Given> struct kvf_operation {
    Made (*made)(Given...);
    const char * name;

    Made operator()(Given... given) const {
        const ggml_tensor * operands[sizeof...(Given)] = {};
        int                 count                      = 0;
        (collect(given, operands, count), ...);
        for (int i = 0; i < n; i++) {
            if (operands[i] == nullptr) {
                kvf_missing_beside(name, operands[i == 0 && count > 1]);
            }
        }
        return made(given...);
    }

  private:
    template <typename T> static void collect(T given, const ggml_tensor ** operands, int & count) {
        if constexpr (std::is_same_v<T, ggml_tensor *>) {
            operands[count++] = given;
        }
    }
};

template <int n, typename Made, typename... Given>
kvf_operation<n, Made, Given...> kvf_operands(Made (*made)(Given...), const char * name) {
    return { made, name };
}

#define ggml_cast(...)              kvf_operands<1>(ggml_cast, "cast")(__VA_ARGS__)
#define ggml_clamp(...)             kvf_operands<1>(ggml_clamp, "clamp")(__VA_ARGS__)
#define ggml_cont(...)              kvf_operands<1>(ggml_cont, "cont")(__VA_ARGS__)
#define ggml_cont_2d(...)           kvf_operands<1>(ggml_cont_2d, "cont_2d")(__VA_ARGS__)
#define ggml_cont_3d(...)           kvf_operands<1>(ggml_cont_3d, "cont_3d")(__VA_ARGS__)
#define ggml_cont_4d(...)           kvf_operands<1>(ggml_cont_4d, "cont_4d")(__VA_ARGS__)
#define ggml_cos(...)               kvf_operands<1>(ggml_cos, "cos")(__VA_ARGS__)
#define ggml_exp(...)               kvf_operands<1>(ggml_exp, "exp")(__VA_ARGS__)
#define ggml_interpolate(...)       kvf_operands<1>(ggml_interpolate, "interpolate")(__VA_ARGS__)
#define ggml_log(...)               kvf_operands<1>(ggml_log, "log")(__VA_ARGS__)
#define ggml_norm(...)              kvf_operands<1>(ggml_norm, "norm")(__VA_ARGS__)
#define ggml_pad(...)               kvf_operands<1>(ggml_pad, "pad")(__VA_ARGS__)
#define ggml_pad_ext(...)           kvf_operands<1>(ggml_pad_ext, "pad_ext")(__VA_ARGS__)
#define ggml_permute(...)           kvf_operands<1>(ggml_permute, "permute")(__VA_ARGS__)
#define ggml_pool_1d(...)           kvf_operands<1>(ggml_pool_1d, "pool_1d")(__VA_ARGS__)
#define ggml_pool_2d(...)           kvf_operands<1>(ggml_pool_2d, "pool_2d")(__VA_ARGS__)
#define ggml_repeat_4d(...)         kvf_operands<1>(ggml_repeat_4d, "repeat_4d")(__VA_ARGS__)
#define ggml_reshape_1d(...)        kvf_operands<1>(ggml_reshape_1d, "reshape_1d")(__VA_ARGS__)
#define ggml_reshape_2d(...)        kvf_operands<1>(ggml_reshape_2d, "reshape_2d")(__VA_ARGS__)
#define ggml_reshape_3d(...)        kvf_operands<1>(ggml_reshape_3d, "reshape_3d")(__VA_ARGS__)
#define ggml_reshape_4d(...)        kvf_operands<1>(ggml_reshape_4d, "reshape_4d")(__VA_ARGS__)
#define ggml_rms_norm(...)          kvf_operands<1>(ggml_rms_norm, "rms_norm")(__VA_ARGS__)
#define ggml_scale(...)             kvf_operands<1>(ggml_scale, "scale")(__VA_ARGS__)
#define ggml_scale_bias(...)        kvf_operands<1>(ggml_scale_bias, "scale_bias")(__VA_ARGS__)
#define ggml_sigmoid(...)           kvf_operands<1>(ggml_sigmoid, "sigmoid")(__VA_ARGS__)
#define ggml_sin(...)               kvf_operands<1>(ggml_sin, "sin")(__VA_ARGS__)
#define ggml_soft_max(...)          kvf_operands<1>(ggml_soft_max, "soft_max")(__VA_ARGS__)
#define ggml_sqr(...)               kvf_operands<1>(ggml_sqr, "sqr")(__VA_ARGS__)
#define ggml_sqrt(...)              kvf_operands<1>(ggml_sqrt, "sqrt")(__VA_ARGS__)
#define ggml_sum_rows(...)          kvf_operands<1>(ggml_sum_rows, "sum_rows")(__VA_ARGS__)
#define ggml_transpose(...)         kvf_operands<1>(ggml_transpose, "transpose")(__VA_ARGS__)
#define ggml_view_1d(...)           kvf_operands<1>(ggml_view_1d, "view_1d")(__VA_ARGS__)
#define ggml_view_2d(...)           kvf_operands<1>(ggml_view_2d, "view_2d")(__VA_ARGS__)
#define ggml_view_3d(...)           kvf_operands<1>(ggml_view_3d, "view_3d")(__VA_ARGS__)
#define ggml_view_4d(...)           kvf_operands<1>(ggml_view_4d, "view_4d")(__VA_ARGS__)
#define ggml_add(...)               kvf_operands<2>(ggml_add, "add")(__VA_ARGS__)
#define ggml_concat(...)            kvf_operands<2>(ggml_concat, "concat")(__VA_ARGS__)
#define ggml_conv_1d(...)           kvf_operands<2>(ggml_conv_1d, "conv_1d")(__VA_ARGS__)
#define ggml_conv_1d_dw(...)        kvf_operands<2>(ggml_conv_1d_dw, "conv_1d_dw")(__VA_ARGS__)
#define ggml_conv_1d_ph(...)        kvf_operands<2>(ggml_conv_1d_ph, "conv_1d_ph")(__VA_ARGS__)
#define ggml_conv_2d(...)           kvf_operands<2>(ggml_conv_2d, "conv_2d")(__VA_ARGS__)
#define ggml_conv_2d_direct(...)    kvf_operands<2>(ggml_conv_2d_direct, "conv_2d_direct")(__VA_ARGS__)
#define ggml_conv_2d_dw(...)        kvf_operands<2>(ggml_conv_2d_dw, "conv_2d_dw")(__VA_ARGS__)
#define ggml_conv_2d_dw_direct(...) kvf_operands<2>(ggml_conv_2d_dw_direct, "conv_2d_dw_direct")(__VA_ARGS__)
#define ggml_conv_transpose_1d(...) kvf_operands<2>(ggml_conv_transpose_1d, "conv_transpose_1d")(__VA_ARGS__)
#define ggml_div(...)               kvf_operands<2>(ggml_div, "div")(__VA_ARGS__)
#define ggml_get_rows(...)          kvf_operands<2>(ggml_get_rows, "get_rows")(__VA_ARGS__)
#define ggml_im2col(...)            kvf_operands<2>(ggml_im2col, "im2col")(__VA_ARGS__)
#define ggml_mul(...)               kvf_operands<2>(ggml_mul, "mul")(__VA_ARGS__)
#define ggml_mul_mat(...)           kvf_operands<2>(ggml_mul_mat, "mul_mat")(__VA_ARGS__)
#define ggml_repeat(...)            kvf_operands<2>(ggml_repeat, "repeat")(__VA_ARGS__)
#define ggml_ssm_conv(...)          kvf_operands<2>(ggml_ssm_conv, "ssm_conv")(__VA_ARGS__)
#define ggml_sub(...)               kvf_operands<2>(ggml_sub, "sub")(__VA_ARGS__)
#define ggml_mul_mat_id(...)        kvf_operands<3>(ggml_mul_mat_id, "mul_mat_id")(__VA_ARGS__)
#define ggml_set_rows(...)          kvf_operands<3>(ggml_set_rows, "set_rows")(__VA_ARGS__)
