// The files of a Hugging Face or PEFT folder: any bytes as a safetensors file are read without a read beyond them, down
// to every value; any text as config.json or adapter_config.json is taken or refused, and what is taken can be written.
#include "fuzz.h"

#include "../../llmc/model_file.h"

// safetensors begin with the length of their header, texts with a brace.
static void fuzz_safetensors(unsigned char *bytes, size_t size) {
    SafeTensors file;
    float values[100];
    memset(&file, 0, sizeof file);
    strcpy(file.path, "fuzz");
    file.map.data = bytes, file.map.size = size;
    if (safetensors_parse(&file) == 0) {
        adapter_targets(&file);
        for (int i = 0; i < file.n_tensors; i++) {
            const SafeTensor *tensor = &file.tensors[i];
            int64_t n = safetensor_count(tensor);
            if (tensor->dtype > DTYPE_F16 && tensor->dtype < DTYPE_SAFETENSORS) continue; // not read: model_file_expect
            for (int64_t at = 0; at < n; at += 100)
                assert(safetensor_read(values, tensor, at, n - at < 100 ? n - at : 100) == 0);
        }
    }
    free(file.tensors);
    json_decref(file.header);
}

static void fuzz_json(const unsigned char *bytes, size_t size) {
    Config config;
    AdapterConfig adapter;
    json_t *json = json_loadb((const char *)bytes, size, JSON_REJECT_DUPLICATES, NULL);
    memset(&adapter, 0, sizeof adapter);
    if (json_is_object(json) && config_from_json(&config, json, "fuzz") == 0)
        json_decref(config_to_json(&config, "float32"));
    if (json_is_object(json) && adapter_from_json(&adapter, json, "fuzz") == 0)
        assert(adapter.lora.rank > 0 && adapter.lora.alpha > 0.0f);
    json_decref(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned char *bytes = fuzz_copy(data, size);
    if (size > 0 && bytes[0] == '{')
        fuzz_json(bytes, size);
    else
        fuzz_safetensors(bytes, size);
    free(bytes);
    return 0;
}

static const char *const texts[] = {
    ("{\"model_type\": \"llama\", \"hidden_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
     " \"num_key_value_heads\": 2, \"intermediate_size\": 40, \"vocab_size\": 61, \"max_position_embeddings\": 48,"
     " \"rms_norm_eps\": 1e-5, \"rope_theta\": 300.0, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0,"
     " \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 32}}"),
    ("{\"model_type\": \"qwen3\", \"hidden_size\": 24, \"num_hidden_layers\": 3, \"num_attention_heads\": 4,"
     " \"num_key_value_heads\": 2, \"head_dim\": 6, \"intermediate_size\": 40, \"vocab_size\": 61, \"sliding_window\": "
     "8,"
     " \"max_position_embeddings\": 48, \"use_sliding_window\": true, \"max_window_layers\": 1, \"rms_norm_eps\": "
     "1e-6}"),
    ("{\"model_type\": \"smollm3\", \"hidden_size\": 24, \"num_hidden_layers\": 3, \"num_attention_heads\": 4,"
     " \"num_key_value_heads\": 2, \"intermediate_size\": 40, \"vocab_size\": 61, \"max_position_embeddings\": 48,"
     " \"no_rope_layers\": [1, 0, 1], \"rms_norm_eps\": 1e-6}"),
    ("{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"q_proj\"], \"bias\": \"none\","
     " \"use_rslora\": true, \"rank_pattern\": {}, \"modules_to_save\": null}")};

// A safetensors file of adapters.
static size_t fuzz_sample(uint8_t *data, size_t max_size, unsigned seed) {
    static const char *const names[] = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
                                        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "x"};
    char header[512];
    int a = (int)(seed % 5),
        n = snprintf(header, sizeof header,
                     "{\"__metadata__\":{\"format\":\"pt\"},\"%s\":{\"dtype\":\"F32\",\"shape\":[%d,3],"
                     "\"data_offsets\":[0,%d]},\"%s\":{\"dtype\":\"BF16\",\"shape\":[4],"
                     "\"data_offsets\":[%d,%d]}}",
                     names[seed / 5 % 3], a, 12 * a, names[(seed / 5 + 1) % 3], 12 * a, 12 * a + 8);
    size_t size = 8 + (size_t)n + 12 * (size_t)a + 8;
    if (size > max_size) return 0;
    memset(data, 0, size);
    data[0] = (uint8_t)(n & 255), data[1] = (uint8_t)(n >> 8);
    memcpy(data + 8, header, (size_t)n);
    return size;
}

// Every eighth input is a new one that is valid.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    if (max_size < 2048 || (size > 1 && seed % 8 != 0)) return LLVMFuzzerMutate(data, size, max_size);
    unsigned which = seed / 8 % 8;
    if (which >= sizeof texts / sizeof *texts) return fuzz_sample(data, max_size, seed / 64);
    memcpy(data, texts[which], strlen(texts[which]));
    return strlen(texts[which]);
}
