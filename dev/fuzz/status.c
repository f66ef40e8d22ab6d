// The status page's request parser: any bytes, arriving in any pieces, are read without a read beyond them, and once a
// request is known it is known as the same with more bytes behind it.
#include "fuzz.h"

#include "../../llmc/status_page.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    StatusRequest known = REQUEST_PARTIAL;
    if (size > STATUS_REQUEST) size = STATUS_REQUEST;
    for (size_t n = 0; n <= size; n += n < 64 || n + 97 > size ? 1 : 97) {
        char *bytes = (char *)fuzz_copy(data, n);
        StatusRequest request = status_request(bytes, n);
        assert(n == STATUS_REQUEST ? request != REQUEST_PARTIAL : request >= REQUEST_PARTIAL);
        assert(request <= REQUEST_BAD && (known == REQUEST_PARTIAL || request == known));
        if (request == REQUEST_PAGE || request == REQUEST_METRICS)
            assert(memcmp(bytes, "GET /", 5) == 0 && memchr(bytes, '\n', n) != NULL);
        known = request;
        free(bytes);
    }
    return 0;
}

// Every fourth input is a request that is answered, or nearly.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const parts[][3] = {{"GET", "HEAD", "get"},
                                           {" / ", " /metrics?x=1 ", " /metricsx "},
                                           {"HTTP/1.1", "HTTP/1.0", "HTTP/2"},
                                           {"\r\n", "\n", "\r\nHost: x\r\n"},
                                           {"\r\n", "\n", "\r"}};
    char text[128] = "";
    if (max_size < sizeof text || (size > 0 && seed % 4 != 0)) return LLVMFuzzerMutate(data, size, max_size);
    Philox draw = rand_block(seed, RAND_TEST, 4, 0);
    for (int i = 0; i < 5; i++) strcat(text, parts[i][(draw.v[i % 4] >> (8 * (i / 4))) % 3]);
    memcpy(data, text, strlen(text));
    return strlen(text);
}
