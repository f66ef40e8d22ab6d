// Reads and writes safetensors files. The reader maps the file, checks all of it before anything is used, and points
// into the map.
//
//   byte    size  little-endian
//      0       8  N, bytes of the header; at most 100,000,000 and within the file
//      8       N  JSON object: tensor name -> {"dtype","shape","data_offsets":[begin,end]}, and "__metadata__":
//      strings;
//                 trailing spaces allowed
//    8+N       *  data; begin and end count from here
// Valid only if the ranges tile the data area exactly (no hole, no overlap, none past the end), each range is its
// shape times its dtype, and no name comes twice. Zero dims and [] shapes are fine.
// Example, 1 F32 scalar 1.0: N = 60,
//   {"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}       + spaces to 60, then 00 00 80 3f
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include <jansson.h> // the header
#include <stdint.h>  // fixed-width integers

#include "dtype.h"
#include "error.h"
#include "file.h"       // FileMap, FileWriter
#include "gguf_quant.h" // quant_read
#include "json.h"       // json_size

#define SAFETENSORS_MAX_HEADER 100000000u
#define SAFETENSORS_MAX_DIMS   8

typedef struct {
    const char *name; // owned by the header's JSON
    Dtype dtype;
    int n_dims;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;   // in the data area
    const uint8_t *data;   // not aligned
    const uint8_t *scales; // of I8 that are weights: fp32, one for every `group` values; NULL: they are none
    int group;
    int interleaved; // head size of a Q or K whose rows pair 2i with 2i+1 for RoPE, as Meta's do; 0: half-split
} SafeTensor;

typedef struct {
    char path[PATH_MAX];
    FileMap map;
    json_t *header;
    json_t *metadata; // object of strings, borrowed from header; NULL if absent
    SafeTensor *tensors;
    int n_tensors;
} SafeTensors;

static inline void safetensors_close(SafeTensors *file) {
    free(file->tensors);
    if (file->header != NULL) json_decref(file->header);
    file_unmap(&file->map);
    file->tensors = NULL, file->header = NULL, file->metadata = NULL, file->n_tensors = 0;
}

static inline int safetensors_parse_tensor(SafeTensor *tensor, const char *path, const char *name, const json_t *entry,
                                           uint64_t data_size) {
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    int found = -1;
    if (!json_is_object(entry)) return error_set("%s: %s: the entry is not an object", path, name);
    for (int d = 0; dtype != NULL && d < DTYPE_SAFETENSORS; d++)
        if (strcmp(dtype, dtype_name((Dtype)d)) == 0) found = d;
    if (found < 0) return error_set("%s: %s: unknown dtype '%.20s'", path, name, dtype != NULL ? dtype : "(none)");
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return error_set("%s: %s: shape is not a list of at most %d sizes", path, name, SAFETENSORS_MAX_DIMS);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return error_set("%s: %s: data_offsets is not a pair", path, name);
    int64_t begin = json_size(json_array_get(offsets, 0)), end = json_size(json_array_get(offsets, 1));
    if (begin < 0 || end < 0) return error_set("%s: %s: data_offsets are not whole non-negative numbers", path, name);
    if (end < begin)
        return error_set("%s: %s: data_offsets end %lld before begin %lld", path, name, (long long)end,
                         (long long)begin);
    if ((uint64_t)end > data_size)
        return error_set("%s: %s: data_offsets end at %lld, the file's data at %llu; is the file cut short?", path,
                         name, (long long)end, (unsigned long long)data_size);
    uint64_t n_bytes = dtype_size((Dtype)found);
    tensor->name = name, tensor->dtype = (Dtype)found, tensor->n_dims = (int)json_array_size(shape);
    tensor->begin = (uint64_t)begin, tensor->end = (uint64_t)end;
    for (int d = 0; d < tensor->n_dims; d++) {
        tensor->shape[d] = json_size(json_array_get(shape, (size_t)d));
        if (tensor->shape[d] < 0) return error_set("%s: %s: a size in shape is not a whole number", path, name);
        if (__builtin_mul_overflow(n_bytes, (uint64_t)tensor->shape[d], &n_bytes))
            return error_set("%s: %s: the shape overflows", path, name);
    }
    if (n_bytes != (uint64_t)(end - begin))
        return error_set("%s: %s: the shape needs %llu bytes, data_offsets give %lld", path, name,
                         (unsigned long long)n_bytes, (long long)(end - begin));
    return 0;
}

static inline int safetensors_by_offset(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static inline int safetensors_parse(SafeTensors *file) {
    const char *path = file->path, *name;
    uint64_t header_size = 0, data_size, position = 0;
    json_error_t error;
    json_t *entry;
    if (file->map.size < 8) return error_set("%s: not a safetensors file: %zu bytes", path, file->map.size);
    for (int i = 7; i >= 0; i--) header_size = header_size << 8 | file->map.data[i];
    if (header_size > SAFETENSORS_MAX_HEADER || header_size > file->map.size - 8)
        return error_set("%s: not a safetensors file, or cut short: header of %llu bytes in a file of %zu", path,
                         (unsigned long long)header_size, file->map.size);
    if (header_size < 2 || file->map.data[8] != '{') return error_set("%s: the header is not a JSON object", path);
    file->header = json_loadb((const char *)file->map.data + 8, header_size, JSON_REJECT_DUPLICATES, &error);
    if (file->header == NULL) return error_set("%s: header: %s", path, error.text);
    if (!json_is_object(file->header)) return error_set("%s: the header is not a JSON object", path);
    data_size = file->map.size - 8 - header_size;
    file->tensors = (SafeTensor *)calloc(json_object_size(file->header) + 1, sizeof *file->tensors);
    if (file->tensors == NULL) return error_set("%s: out of memory", path);
    json_object_foreach(file->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            const char *key;
            json_t *value;
            if (!json_is_object(entry)) return error_set("%s: __metadata__ is not an object", path);
            json_object_foreach(entry, key, value) {
                if (!json_is_string(value)) return error_set("%s: __metadata__ '%s' is not a string", path, key);
            }
            file->metadata = entry;
            continue;
        }
        if (safetensors_parse_tensor(&file->tensors[file->n_tensors], path, name, entry, data_size)) return -1;
        file->tensors[file->n_tensors].data = file->map.data + 8 + header_size + file->tensors[file->n_tensors].begin;
        file->n_tensors++;
    }
    qsort(file->tensors, (size_t)file->n_tensors, sizeof *file->tensors, safetensors_by_offset);
    for (int i = 0; i < file->n_tensors; i++) {
        const SafeTensor *tensor = &file->tensors[i];
        if (tensor->begin != position)
            return error_set("%s: %s: data begins at %llu, %s the tensor before, which ends at %llu", path,
                             tensor->name, (unsigned long long)tensor->begin,
                             tensor->begin < position ? "inside" : "with a hole after", (unsigned long long)position);
        position = tensor->end;
    }
    if (position != data_size)
        return error_set("%s: %llu bytes of data belong to no tensor", path,
                         (unsigned long long)(data_size - position));
    return 0;
}

// Maps a file of any kind that becomes such a table; nothing is checked yet. 0, or -1 with an error message.
static inline int safetensors_map(SafeTensors *file, const char *path) {
    memset(file, 0, sizeof *file);
    if (snprintf(file->path, sizeof file->path, "%s", path) >= (int)sizeof file->path)
        return error_set("%.200s: the path is too long", path);
    return file_map(&file->map, path);
}

// Maps and checks a file. 0, or -1 with one line naming file, tensor and reason; nothing is left open then.
static inline int safetensors_open(SafeTensors *file, const char *path) {
    if (safetensors_map(file, path)) return -1;
    if (safetensors_parse(file)) {
        safetensors_close(file);
        return -1;
    }
    return 0;
}

// The tensor of that name, NULL if absent.
static inline const SafeTensor *safetensors_find(const SafeTensors *file, const char *name) {
    for (int i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

static inline int64_t safetensor_count(const SafeTensor *tensor) {
    return (int64_t)((tensor->end - tensor->begin) / dtype_size(tensor->dtype)) * dtype_block(tensor->dtype);
}

// I8 with a scale for every group of values.
static inline void safetensor_read_groups(float *out, const SafeTensor *tensor, int64_t first, int64_t n) {
    float scale = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = first + i;
        if (i == 0 || at % tensor->group == 0) memcpy(&scale, tensor->scales + 4 * (at / tensor->group), 4);
        out[i] = scale * (float)(int8_t)tensor->data[at];
    }
}

// Elements in the order in which they lie in the file.
static inline int safetensor_read_stored(float *out, const SafeTensor *tensor, int64_t first, int64_t n) {
    if (tensor->dtype >= DTYPE_SAFETENSORS) {
        quant_read(out, tensor->dtype, tensor->data, first, n);
        return 0;
    }
    const uint8_t *from = tensor->data + (size_t)first * dtype_size(tensor->dtype);
    uint16_t half;
    switch (tensor->dtype) {
    case DTYPE_F32: memcpy(out, from, sizeof(float) * (size_t)n); return 0;
    case DTYPE_BF16:
        for (int64_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * i, 2);
            out[i] = float_of_bf16(half);
        }
        return 0;
    case DTYPE_F16:
        for (int64_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * i, 2);
            out[i] = float_of_half(half);
        }
        return 0;
    case DTYPE_I8:
        if (tensor->scales == NULL) break;
        safetensor_read_groups(out, tensor, first, n);
        return 0;
    default: break;
    }
    return error_set("%s: dtype %s; only F32, BF16 and F16 are read", tensor->name, dtype_name(tensor->dtype));
}

// Where the file has a row that is half-split: i of a head's first half lies at 2i, i of its second at 2i+1.
static inline int64_t safetensor_stored_row(const SafeTensor *tensor, int64_t row) {
    int64_t half = tensor->interleaved / 2, i = row % tensor->interleaved;
    return row - i + (i < half ? 2 * i : 2 * (i - half) + 1);
}

// out (n) = the tensor's elements from `first` on, widened to fp32, rows of heads half-split. The dtype must be F32,
// BF16, F16, blocks of a GGUF or I8 with scales.
static inline int safetensor_read(float *out, const SafeTensor *tensor, int64_t first, int64_t n) {
    int64_t columns = tensor->n_dims > 1 ? tensor->shape[1] : 1, at = first;
    if (tensor->interleaved == 0) return safetensor_read_stored(out, tensor, first, n);
    while (at < first + n) {
        int64_t skip = at % columns, left = first + n - at, count = left < columns - skip ? left : columns - skip;
        int64_t row = safetensor_stored_row(tensor, at / columns);
        if (safetensor_read_stored(out + (at - first), tensor, row * columns + skip, count)) return -1;
        at += count;
    }
    return 0;
}

// A file being written: declare every tensor, then begin, then append each tensor's values in the same order. A call
// that fails before begin has cleaned up; after it, file_writer_close does.
typedef struct {
    json_t *header;
    uint64_t size;
    FileWriter file;
} SafeTensorsWriter;

// metadata: object of strings, its reference is taken over; NULL for none.
static inline int safetensors_writer_init(SafeTensorsWriter *writer, json_t *metadata) {
    writer->header = json_object();
    writer->size = 0;
    if (writer->header != NULL &&
        (metadata == NULL || json_object_set_new(writer->header, "__metadata__", metadata) == 0))
        return 0;
    json_decref(writer->header);
    return error_set("out of memory for a safetensors header");
}

static inline int safetensors_declare(SafeTensorsWriter *writer, const char *name, Dtype dtype, const int64_t *shape,
                                      int n_dims) {
    uint64_t n_bytes = dtype_size(dtype);
    json_t *dims = json_array();
    for (int d = 0; d < n_dims; d++) {
        n_bytes *= (uint64_t)shape[d]; // sizes were checked when the model was made
        json_array_append_new(dims, json_integer(shape[d]));
    }
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_name(dtype), "shape", dims, "data_offsets",
                              (json_int_t)writer->size, (json_int_t)(writer->size + n_bytes));
    if (entry == NULL || json_object_set_new(writer->header, name, entry) != 0) {
        json_decref(writer->header);
        return error_set("out of memory for a safetensors header");
    }
    writer->size += n_bytes;
    return 0;
}

// Opens path and writes the header, padded so that the data begin on 64 bytes.
static inline int safetensors_begin(SafeTensorsWriter *writer, const char *path) {
    char *text = json_dumps(writer->header, JSON_COMPACT);
    json_decref(writer->header);
    writer->header = NULL;
    if (text == NULL) return error_set("%s: out of memory for the header", path);
    size_t length = strlen(text), padded = (length + 8 + 63) / 64 * 64 - 8;
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)padded >> (8 * i));
    if (padded > SAFETENSORS_MAX_HEADER || file_writer_open(&writer->file, path)) {
        if (padded > SAFETENSORS_MAX_HEADER) error_set("%s: the header would be over 100 MB", path);
        free(text);
        return -1;
    }
    file_write(&writer->file, size, 8);
    file_write(&writer->file, text, length);
    for (size_t i = length; i < padded; i++) file_write(&writer->file, " ", 1);
    free(text);
    return 0;
}

// Writes n values as F32, BF16 or F16, rounded to nearest even.
static inline void floats_write(FileWriter *file, const float *values, int64_t n, Dtype dtype) {
    uint16_t halves[4096];
    if (dtype == DTYPE_F32) {
        file_write(file, values, sizeof(float) * (size_t)n);
        return;
    }
    for (int64_t i = 0; i < n; i += 4096) {
        int64_t count = n - i < 4096 ? n - i : 4096;
        for (int64_t j = 0; j < count; j++)
            halves[j] = dtype == DTYPE_F16 ? half_of_float(values[i + j]) : bf16_of_float(values[i + j]);
        file_write(file, halves, 2 * (size_t)count);
    }
}

// Appends n values as the dtype they were declared with.
static inline void safetensors_append(SafeTensorsWriter *writer, const float *values, int64_t n, Dtype dtype) {
    floats_write(&writer->file, values, n, dtype);
}

#endif
