// Reads and writes GGUF files, the format of llama.cpp. The reader maps the file, checks all of it before anything is
// used and gives the same table as a safetensors file: tensors point into the map, metadata are JSON.
//
//   byte  size   little-endian
//      0     4   "GGUF"
//      4     4   version, 2 or 3
//      8     8   number of tensors
//     16     8   number of metadata
//     24     *   metadata: key (string), type (u32), value. A string: u64 length, bytes. An array: u32 type, u64 count,
//                values. Types: 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9 array, 10 u64,
//                11 i64, 12 f64
//      *     *   tensors: name (string), u32 number of dims (at most 4), u64 dims, the fastest first, u32 type, u64
//      offset
//                in the data
//      *     *   data, from the next multiple of the alignment (general.alignment, else 32)
// Valid only if every length is within the file, no key and no name comes twice, rows are whole blocks, offsets are
// multiples of the alignment, and no two tensors overlap. What the gaps hold does not matter.
#ifndef LLMC_GGUF_H
#define LLMC_GGUF_H

#include <jansson.h> // metadata
#include <math.h>    // isfinite
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "file.h"        // FileWriter
#include "safetensors.h" // SafeTensors, the table that is filled

enum {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_VALUE_TYPES
};

enum {
    GGUF_ALIGNMENT = 32, // where the file does not say
    GGUF_MAX_ALIGNMENT = 1 << 20,
    GGUF_MAX_METADATA = 1 << 16,
    GGUF_MAX_TENSORS = 1 << 20,
    GGUF_MAX_ELEMENTS = 1 << 25, // of all arrays together: a vocabulary of 2^24 has as many scores and types
    GGUF_MAX_DEPTH = 4,          // of arrays in arrays
    GGUF_MAX_NAME = 127,
    GGUF_MAX_DIMS = 4
};

// Types of tensors by their number in the file; names of those that are not read are for the message.
typedef struct {
    int number, dtype; // -1: not read
    const char *name;
} GgufType;

static const GgufType gguf_types[] = {
    {0, DTYPE_F32, "F32"},    {1, DTYPE_F16, "F16"},    {2, DTYPE_Q4_0, "Q4_0"},  {3, DTYPE_Q4_1, "Q4_1"},
    {6, DTYPE_Q5_0, "Q5_0"},  {7, DTYPE_Q5_1, "Q5_1"},  {8, DTYPE_Q8_0, "Q8_0"},  {10, DTYPE_Q2_K, "Q2_K"},
    {11, DTYPE_Q3_K, "Q3_K"}, {12, DTYPE_Q4_K, "Q4_K"}, {13, DTYPE_Q5_K, "Q5_K"}, {14, DTYPE_Q6_K, "Q6_K"},
    {30, DTYPE_BF16, "BF16"}, {16, -1, "IQ2_XXS"},      {17, -1, "IQ2_XS"},       {18, -1, "IQ3_XXS"},
    {19, -1, "IQ1_S"},        {20, -1, "IQ4_NL"},       {21, -1, "IQ3_S"},        {22, -1, "IQ2_S"},
    {23, -1, "IQ4_XS"},       {24, -1, "I8"},           {25, -1, "I16"},          {26, -1, "I32"},
    {27, -1, "I64"},          {28, -1, "F64"},          {29, -1, "IQ1_M"},        {34, -1, "TQ1_0"},
    {35, -1, "TQ2_0"},        {39, -1, "MXFP4"},
};
enum { GGUF_TYPES = sizeof gguf_types / sizeof *gguf_types };

// The number of a dtype in the file; the dtype must be one that is written: F32, F16, BF16.
static inline uint32_t gguf_type_number(Dtype dtype) {
    return dtype == DTYPE_F32 ? 0 : dtype == DTYPE_F16 ? 1 : 30;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    const uint8_t *data;
    size_t size, at;
    int64_t elements; // of arrays so far
    const char *path;
} GgufReader;

// 0 if n more bytes are there. what: for the message
static inline int gguf_need(const GgufReader *r, uint64_t n, const char *what) {
    if (n <= r->size - r->at) return 0;
    return error_set("%s: %.*s: %llu bytes at %zu, the file ends at %zu; is it cut short?", r->path, GGUF_MAX_NAME,
                     what, (unsigned long long)n, r->at, r->size);
}

// *out = a whole number of `size` bytes, without a sign.
static inline int gguf_unsigned(GgufReader *r, int size, uint64_t *out, const char *what) {
    if (gguf_need(r, (uint64_t)size, what)) return -1;
    *out = 0;
    for (int i = size - 1; i >= 0; i--) *out = *out << 8 | r->data[r->at + (size_t)i];
    r->at += (size_t)size;
    return 0;
}

// A string as JSON; NULL with an error message.
static inline json_t *gguf_string(GgufReader *r, const char *what) {
    uint64_t length;
    if (gguf_unsigned(r, 8, &length, what) || gguf_need(r, length, what)) return NULL;
    json_t *text = json_stringn((const char *)r->data + r->at, (size_t)length);
    if (text == NULL) error_set("%s: %.*s: the text is not UTF-8", r->path, GGUF_MAX_NAME, what);
    r->at += (size_t)length;
    return text;
}

// name (GGUF_MAX_NAME + 1) = a string that names something: not empty, not too long, UTF-8, no NUL.
static inline int gguf_name(GgufReader *r, char *name, const char *what) {
    json_t *text = gguf_string(r, what);
    if (text == NULL) return -1;
    size_t length = json_string_length(text);
    int ok = length > 0 && length <= GGUF_MAX_NAME && strlen(json_string_value(text)) == length;
    if (ok) memcpy(name, json_string_value(text), length + 1);
    json_decref(text);
    return ok ? 0
              : error_set("%s: %s has a name of %zu bytes; it must be plain text of 1 to %d", r->path, what, length,
                          GGUF_MAX_NAME);
}

static inline double gguf_float(uint64_t bits, int size) {
    double value;
    if (size == 4) return (double)float_of_bits((uint32_t)bits);
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A value that is neither string nor array; what is not finite becomes null. NULL with an error message.
static inline json_t *gguf_scalar(GgufReader *r, uint64_t type, const char *key) {
    static const int sizes[GGUF_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t bits;
    int size = sizes[type], shift = 64 - 8 * size;
    if (gguf_unsigned(r, size, &bits, key)) return NULL;
    if (type == GGUF_F32 || type == GGUF_F64) {
        double value = gguf_float(bits, size);
        return isfinite(value) ? json_real(value) : json_null();
    }
    if (type == GGUF_BOOL && bits > 1) {
        error_set("%s: %s: a truth value is %d", r->path, key, (int)bits);
        return NULL;
    }
    if (type == GGUF_BOOL) return json_boolean(bits == 1);
    if (type == GGUF_U64 && bits > INT64_MAX) {
        error_set("%s: %s: %llu is too large", r->path, key, (unsigned long long)bits);
        return NULL;
    }
    int is_signed = type == GGUF_I8 || type == GGUF_I16 || type == GGUF_I32 || type == GGUF_I64;
    return json_integer(is_signed ? (json_int_t)((int64_t)(bits << shift) >> shift) : (json_int_t)bits);
}

static inline json_t *gguf_value(GgufReader *r, uint64_t type, const char *key, int depth);

static inline json_t *gguf_array(GgufReader *r, const char *key, int depth) {
    uint64_t type, count;
    if (gguf_unsigned(r, 4, &type, key) || gguf_unsigned(r, 8, &count, key) || gguf_need(r, count, key)) return NULL;
    if (depth == GGUF_MAX_DEPTH || count > (uint64_t)(GGUF_MAX_ELEMENTS - r->elements)) {
        error_set("%s: %s: an array too %s", r->path, key, depth == GGUF_MAX_DEPTH ? "deep" : "long");
        return NULL;
    }
    r->elements += (int64_t)count;
    json_t *array = json_array();
    for (uint64_t i = 0; i < count; i++) {
        json_t *value = gguf_value(r, type, key, depth + 1);
        if (value != NULL && json_array_append_new(array, value) == 0) continue;
        if (value != NULL) error_set("%s: out of memory for %s", r->path, key);
        json_decref(array);
        return NULL;
    }
    return array;
}

static inline json_t *gguf_value(GgufReader *r, uint64_t type, const char *key, int depth) {
    if (type == GGUF_STRING) return gguf_string(r, key);
    if (type == GGUF_ARRAY) return gguf_array(r, key, depth);
    if (type < GGUF_VALUE_TYPES) return gguf_scalar(r, type, key);
    error_set("%s: %s: unknown type %llu", r->path, key, (unsigned long long)type);
    return NULL;
}

static inline int gguf_read_metadata(GgufReader *r, uint64_t n, json_t *metadata) {
    char key[GGUF_MAX_NAME + 1];
    uint64_t type;
    for (uint64_t i = 0; i < n; i++) {
        if (gguf_name(r, key, "a metadata key") || gguf_unsigned(r, 4, &type, key)) return -1;
        if (json_object_get(metadata, key) != NULL) return error_set("%s: %s is in it twice", r->path, key);
        json_t *value = gguf_value(r, type, key, 0);
        if (value == NULL) return -1;
        if (json_object_set_new(metadata, key, value) != 0) return error_set("%s: out of memory for %s", r->path, key);
    }
    return 0;
}

// The dims, the slowest first, and their product.
static inline int gguf_read_shape(GgufReader *r, SafeTensor *tensor, uint64_t n_dims, uint64_t *n_values) {
    if (n_dims > GGUF_MAX_DIMS)
        return error_set("%s: %s has %llu dims, at most %d are read", r->path, tensor->name, (unsigned long long)n_dims,
                         GGUF_MAX_DIMS);
    tensor->n_dims = (int)n_dims;
    *n_values = 1;
    for (int d = (int)n_dims - 1; d >= 0; d--) {
        uint64_t size;
        if (gguf_unsigned(r, 8, &size, tensor->name)) return -1;
        if (size > INT64_MAX || __builtin_mul_overflow(*n_values, size, n_values) || *n_values > INT64_MAX)
            return error_set("%s: %s: the shape overflows", r->path, tensor->name);
        tensor->shape[d] = (int64_t)size;
    }
    return 0;
}

static inline int gguf_read_type(GgufReader *r, SafeTensor *tensor) {
    uint64_t number;
    if (gguf_unsigned(r, 4, &number, tensor->name)) return -1;
    for (int i = 0; i < GGUF_TYPES; i++) {
        if ((uint64_t)gguf_types[i].number != number) continue;
        tensor->dtype = (Dtype)(gguf_types[i].dtype >= 0 ? gguf_types[i].dtype : 0);
        if (gguf_types[i].dtype >= 0) return 0;
        return error_set("%s: %s has type %s, which is not read; take a file of Q8_0, Q4_K, Q6_K, F16 or the like",
                         r->path, tensor->name, gguf_types[i].name);
    }
    return error_set("%s: %s has unknown type %llu", r->path, tensor->name, (unsigned long long)number);
}

// One entry of the table; begin and end count from the data's begin, which is not known yet.
static inline int gguf_read_tensor(GgufReader *r, SafeTensor *tensor, json_t *names) {
    char name[GGUF_MAX_NAME + 1];
    uint64_t n_dims, n_values = 0, n_bytes;
    if (gguf_name(r, name, "a tensor") || gguf_unsigned(r, 4, &n_dims, name)) return -1;
    if (json_object_get(names, name) != NULL) return error_set("%s: tensor %s is in it twice", r->path, name);
    if (json_object_set_new(names, name, json_null()) != 0) return error_set("%s: out of memory", r->path);
    tensor->name = json_object_iter_key(json_object_iter_at(names, name));
    if (gguf_read_shape(r, tensor, n_dims, &n_values) || gguf_read_type(r, tensor) ||
        gguf_unsigned(r, 8, &tensor->begin, name))
        return -1;
    uint64_t block = (uint64_t)dtype_block(tensor->dtype);
    uint64_t row = tensor->n_dims > 0 ? (uint64_t)tensor->shape[tensor->n_dims - 1] : 1;
    if (row % block != 0)
        return error_set("%s: %s: rows of %llu values are not whole blocks of %s, which has %llu", r->path, name,
                         (unsigned long long)row, dtype_name(tensor->dtype), (unsigned long long)block);
    if (__builtin_mul_overflow(n_values / block, (uint64_t)dtype_size(tensor->dtype), &n_bytes) ||
        __builtin_add_overflow(tensor->begin, n_bytes, &tensor->end))
        return error_set("%s: %s: the shape overflows", r->path, name);
    return 0;
}

// *alignment = what the metadata say, a power of two.
static inline int gguf_alignment(const json_t *metadata, const char *path, uint64_t *alignment) {
    const json_t *value = json_object_get(metadata, "general.alignment");
    int64_t given = value != NULL ? json_size(value) : (int64_t)GGUF_ALIGNMENT;
    *alignment = (uint64_t)given;
    if (given >= 1 && given <= GGUF_MAX_ALIGNMENT && (given & (given - 1)) == 0) return 0;
    return error_set("%s: general.alignment is not a power of two up to %d", path, GGUF_MAX_ALIGNMENT);
}

// The table is read: where the tensors lie, once the data's begin is known.
static inline int gguf_place(SafeTensors *file, const GgufReader *r) {
    uint64_t alignment, position = 0;
    if (gguf_alignment(file->metadata, file->path, &alignment)) return -1;
    uint64_t data = (r->at + alignment - 1) / alignment * alignment, data_size = data < r->size ? r->size - data : 0;
    qsort(file->tensors, (size_t)file->n_tensors, sizeof *file->tensors, safetensors_by_offset);
    for (int i = 0; i < file->n_tensors; i++) {
        SafeTensor *tensor = &file->tensors[i];
        unsigned long long begin = tensor->begin, end = tensor->end;
        if (begin % alignment != 0)
            return error_set("%s: %s: offset %llu is not a multiple of the alignment %llu", file->path, tensor->name,
                             begin, (unsigned long long)alignment);
        if (end > data_size)
            return error_set("%s: %s ends at %llu of the data, which end at %llu; is the file cut short?", file->path,
                             tensor->name, end, (unsigned long long)data_size);
        if (begin < position)
            return error_set("%s: %s begins at %llu, inside the tensor before, which ends at %llu", file->path,
                             tensor->name, begin, (unsigned long long)position);
        if (end > begin) position = end, tensor->data = file->map.data + data + begin;
    }
    return 0;
}

static inline int gguf_parse(SafeTensors *file) {
    GgufReader r = {file->map.data, file->map.size, 4, 0, file->path};
    uint64_t version, n_tensors, n_metadata;
    if (r.size < 4 || memcmp(r.data, "GGUF", 4) != 0) return error_set("%s: not a GGUF file", r.path);
    if (gguf_unsigned(&r, 4, &version, "the header")) return -1;
    if (version != 2 && version != 3)
        return error_set("%s: GGUF version %llu; 2 and 3 are read, little-endian", r.path, (unsigned long long)version);
    if (gguf_unsigned(&r, 8, &n_tensors, "the header") || gguf_unsigned(&r, 8, &n_metadata, "the header")) return -1;
    if (n_tensors > GGUF_MAX_TENSORS || n_metadata > GGUF_MAX_METADATA)
        return error_set("%s: %llu tensors and %llu metadata are more than a model has", r.path,
                         (unsigned long long)n_tensors, (unsigned long long)n_metadata);
    file->header = json_object();
    file->metadata = json_object();
    if (json_object_set_new(file->header, "__metadata__", file->metadata) != 0)
        return error_set("%s: out of memory", r.path);
    if (gguf_read_metadata(&r, n_metadata, file->metadata)) return -1;
    if (gguf_need(&r, 24 * n_tensors, "the table of tensors")) return -1; // an entry's least
    file->tensors = (SafeTensor *)calloc((size_t)n_tensors + 1, sizeof *file->tensors);
    if (file->tensors == NULL) return error_set("%s: out of memory", r.path);
    for (uint64_t i = 0; i < n_tensors; i++) {
        if (gguf_read_tensor(&r, &file->tensors[i], file->header)) return -1;
        file->n_tensors++;
    }
    return gguf_place(file, &r);
}

// Maps and checks a file; metadata are JSON: numbers, truth values, strings and arrays. 0, or -1 with one line naming
// file, field and reason; nothing is left open then. safetensors_close closes it.
static inline int gguf_open(SafeTensors *file, const char *path) {
    if (safetensors_map(file, path)) return -1;
    if (gguf_parse(file)) {
        safetensors_close(file);
        return -1;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing: count what will be there, then put it in the same order.

static inline void gguf_put_number(FileWriter *file, uint64_t value, int size) {
    unsigned char bytes[8];
    for (int i = 0; i < size; i++) bytes[i] = (unsigned char)(value >> (8 * i));
    file_write(file, bytes, (size_t)size);
}

static inline void gguf_put_text(FileWriter *file, const char *text, size_t length) {
    gguf_put_number(file, length, 8);
    file_write(file, text, length);
}

// The type under which a JSON value is written: whole numbers as u32 (arrays of them as i32), others as f32.
static inline int gguf_json_type(const json_t *value, int in_array) {
    if (json_is_string(value)) return GGUF_STRING;
    if (json_is_array(value)) return GGUF_ARRAY;
    if (json_is_boolean(value)) return GGUF_BOOL;
    return json_is_integer(value) ? in_array ? GGUF_I32 : GGUF_U32 : GGUF_F32;
}

static inline void gguf_put_value(FileWriter *file, const json_t *value, int type) {
    size_t index;
    json_t *element;
    uint32_t bits;
    float number = (float)json_number_value(value);
    switch (type) {
    case GGUF_STRING: gguf_put_text(file, json_string_value(value), json_string_length(value)); return;
    case GGUF_BOOL: gguf_put_number(file, json_is_true(value), 1); return;
    case GGUF_F32:
        memcpy(&bits, &number, sizeof bits);
        gguf_put_number(file, bits, 4);
        return;
    case GGUF_ARRAY: { // of one type, strings where it is empty
        int inner = json_array_size(value) > 0 ? gguf_json_type(json_array_get(value, 0), 1) : GGUF_STRING;
        gguf_put_number(file, (uint64_t)inner, 4);
        gguf_put_number(file, json_array_size(value), 8);
        json_array_foreach(value, index, element) {
            gguf_put_value(file, element, inner);
        }
        return;
    }
    default: gguf_put_number(file, (uint64_t)json_integer_value(value), 4); return;
    }
}

// Header and metadata (object; whole numbers below 2^32, arrays of one type).
static inline void gguf_put_head(FileWriter *file, const json_t *metadata, int64_t n_tensors) {
    const char *key;
    json_t *value;
    file_write(file, "GGUF", 4);
    gguf_put_number(file, 3, 4);
    gguf_put_number(file, (uint64_t)n_tensors, 8);
    gguf_put_number(file, json_object_size(metadata), 8);
    json_object_foreach((json_t *)metadata, key, value) {
        int type = gguf_json_type(value, 0);
        gguf_put_text(file, key, strlen(key));
        gguf_put_number(file, (uint64_t)type, 4);
        gguf_put_value(file, value, type);
    }
}

// An entry of the table; *offset is where the tensor lies, and then where the next one will.
static inline void gguf_put_entry(FileWriter *file, const char *name, Dtype dtype, const int64_t *shape, int n_dims,
                                  uint64_t *offset) {
    uint64_t n_bytes = dtype_size(dtype);
    gguf_put_text(file, name, strlen(name));
    gguf_put_number(file, (uint64_t)n_dims, 4);
    for (int d = n_dims - 1; d >= 0; d--) {
        gguf_put_number(file, (uint64_t)shape[d], 8);
        n_bytes *= (uint64_t)shape[d]; // sizes were checked when the model was made
    }
    gguf_put_number(file, gguf_type_number(dtype), 4);
    gguf_put_number(file, *offset, 8);
    *offset += (n_bytes + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
}

// Zeros up to the next multiple of the alignment, after the table and after each tensor.
static inline void gguf_put_padding(FileWriter *file) {
    static const unsigned char zeros[GGUF_ALIGNMENT] = {0};
    long at = file->error == 0 ? ftell(file->file) : 0;
    if (at < 0 && file->error == 0) file->error = errno;
    if (at > 0 && at % GGUF_ALIGNMENT != 0) file_write(file, zeros, (size_t)(GGUF_ALIGNMENT - at % GGUF_ALIGNMENT));
}

#endif
