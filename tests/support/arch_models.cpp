// Writes a tiny random model of every architecture that upstream's fixtures can make. Usage: arch_models FOLDER [NAME...]
// One line per model on stdout: its file name, preceded by "- " if there is no such file.
#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

#include <sys/wait.h>
#include <unistd.h>

#include <set>

// Upstream's saver knows some architectures only in part; the metadata that the model was made from is complete.
static void write(gguf_context * metadata, const llama_model & model, const std::string & path) {
    gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), metadata);
    std::set<std::string> seen;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        if (seen.insert(name).second) {
            gguf_add_tensor(out.get(), tensor);
        }
    }
    if (!gguf_write_to_file(out.get(), path.c_str(), false)) {
        throw std::runtime_error("cannot write " + path);
    }
}

// What upstream's fixtures lack, and a context that is longer than the pool under test, and enough for a calibration.
static void complete(gguf_context * metadata, llm_arch arch) {
    const LLM_KV key(arch);
    gguf_set_val_u32(metadata, key(LLM_KV_CONTEXT_LENGTH).c_str(), 1280);
    gguf_set_val_u32(metadata, key(LLM_KV_TOKENIZER_TOKEN_TYPE_COUNT).c_str(), 2);
    if (arch == LLM_ARCH_GEMMA4) {
        const uint32_t pattern[] = { 1, 1, 1, 1, 0 };
        gguf_set_arr_data(metadata, key(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN).c_str(), GGUF_TYPE_UINT32, pattern, 5);
    }
    if (arch == LLM_ARCH_LFM2) {
        // the released models have full attention
        gguf_remove_key(metadata, key(LLM_KV_ATTENTION_SLIDING_WINDOW).c_str());
    }
}

static void make(llm_arch arch, bool moe, const std::string & path) {
    gguf_context_ptr metadata = get_gguf_ctx(arch, moe);
    complete(metadata.get(), arch);
    tensor_data_params values = { 1, 0.1f };
    ggml_backend_dev_t devices[] = { ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr };
    llama_model_params params = llama_model_default_params();
    params.devices           = devices;
    params.progress_callback = silent_model_load_progress;
    llama_model_ptr model(llama_model_init_from_user(metadata.get(), set_tensor_data, &values, params));
    if (!model) {
        throw std::runtime_error("no model can be made of upstream's fixture");
    }
    write(metadata.get(), *model, path);
}

int main(int argc, char ** argv) {
    const std::string folder = argv[1];
    const std::set<std::string> only(argv + 2, argv + argc);
    for (const llm_arch arch : llm_arch_all()) {
        const std::string name = llm_arch_name(arch);
        if (arch == LLM_ARCH_UNKNOWN || (!only.empty() && !only.count(name))) {
            continue;
        }
        for (bool moe : { false, true }) {
            const bool only_moe = moe_mandatory(arch) || arch == LLM_ARCH_DEEPSEEK2OCR;
            if (moe ? !(only_moe || moe_implemented(arch)) : only_moe) {
                continue;
            }
            const std::string file = name + (moe ? "+moe.gguf" : ".gguf");
            // a fixture that does not fit its architecture may abort
            const pid_t child = fork();
            if (child == 0) {
                alarm(60);
                try {
                    make(arch, moe, folder + "/" + file);
                } catch (const std::exception & err) {
                    fprintf(stderr, "%s: %s\n", file.c_str(), err.what());
                    _exit(1);
                }
                _exit(0);
            }
            int status = 0;
            waitpid(child, &status, 0);
            if (status == 0) {
                printf("%s\n", file.c_str());
            } else {
                printf("- %s\n", file.c_str());
            }
            fflush(stdout);
        }
    }
    return 0;
}
