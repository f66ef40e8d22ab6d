// Frames of the network: any bytes are read without a read beyond them, what is accepted is written back the same, and
// a receiver of a stream takes any sequence of frames.
//
//   frames, one after the other: 3 bytes length, then as many bytes
#include "fuzz.h"

#include "../../llmc/net_stream.h"

enum { LENGTH = 3, LIMIT = 600 * 1024 };

static void fuzz_receive(NetReceiver *r, const Frame *frame, const unsigned char *piece) {
    Frame ack;
    if (receiver_is_next(r, frame)) {
        uint64_t expected = r->expected;
        int taken = receiver_take(r, frame, piece, LIMIT, RECEIVER_MEMORY);
        assert(r->expected == expected + (taken >= 0) && r->got <= LIMIT);
        if (taken == 1) {
            assert(r->got == r->head.total);
            free(r->data);
            r->data = NULL;
        }
    }
    receiver_ack(r, &ack, frame->stream);
    assert(ack.ack <= r->expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    NetReceiver r;
    Frame frame;
    receiver_init(&r);
    while (size > LENGTH) {
        size_t n = (size_t)frame_get(data, LENGTH);
        data += LENGTH, size -= LENGTH;
        if (n > size) n = size;
        unsigned char *bytes = fuzz_copy(data, n);
        if (frame_parse(&frame, bytes, (int64_t)n) == 0) {
            unsigned char *again = (unsigned char *)malloc(n);
            if (again == NULL) abort();
            frame_write(again, &frame, bytes + FRAME_HEADER);
            assert(memcmp(again, bytes, n) == 0);
            if (frame.kind == FRAME_DATA) fuzz_receive(&r, &frame, bytes + FRAME_HEADER);
            free(again);
        }
        free(bytes);
        data += n, size -= n;
    }
    receiver_abandon(&r);
    return 0;
}

// Every fourth input is a new sequence: small messages in order, now and then a frame that does not fit.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    size_t n = 0;
    Frame frame;
    if (max_size < 4096 || (size > 0 && seed % 4 != 0)) return LLVMFuzzerMutate(data, size, max_size);
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_DATA, frame.epoch = 1;
    for (uint32_t i = 0; n + LENGTH + FRAME_HEADER + 64 < max_size && i < 16; i++) {
        Philox draw = rand_block(seed, RAND_TEST, 3, i);
        frame.total = frame.piece_bytes = draw.v[0] % 64;
        if (draw.v[1] % 8 == 0) frame.epoch += draw.v[2] % 2, frame.seq = frame.message = 0;
        frame_put(data + n, FRAME_HEADER + (uint64_t)frame.piece_bytes, LENGTH);
        frame_write_header(data + n + LENGTH, &frame);
        memset(data + n + LENGTH + FRAME_HEADER, (int)i, (size_t)frame.piece_bytes);
        n += LENGTH + FRAME_HEADER + (size_t)frame.piece_bytes;
        frame.seq++, frame.message++;
    }
    return n;
}
