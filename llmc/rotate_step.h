// Adam in a rotated basis, the part that is the same on the CPU and on the GPU. It sees matrices only through what
// rotate.h and rotate.cuh, linalg.h and linalg.cuh both define. All pointers are the backend's memory.
//
// No include guard: each of the two includes it once, and a program that compares them has both.

// The bases of a matrix and the second moments they are learned from. NULL: that side is not rotated; no moments.
typedef struct {
    float *left, *right;               // Q_L (m,m), Q_R (n,n), a basis vector a column
    float *left_moment, *right_moment; // L (m,m), R (n,n) if bases come of second moments
} RotateBasis;

// Memory of a step: three matrices (m,n), a square of the longest side, keys of the longer side and their order.
typedef struct {
    float *a, *b, *c, *square, *keys;
    int *order;
} RotateWork;

// Lays a matrix's bases out in rotate_state_floats of memory.
static inline RotateBasis rotate_basis(float *memory, RotateSides sides, RotateSource source, int m, int n) {
    RotateBasis basis = {NULL, NULL, NULL, NULL};
    int64_t left = (int64_t)m * m, right = (int64_t)n * n;
    if (sides.left) basis.left = memory, memory += left;
    if (sides.left && source == ROTATE_2ND) basis.left_moment = memory, memory += left;
    if (sides.right) basis.right = memory, memory += right;
    if (sides.right && source == ROTATE_2ND) basis.right_moment = memory;
    return basis;
}

// 0, or -1 without memory.
static inline int rotate_work(RotateWork *work, RotateSides sides, int m, int n, Stream *stream) {
    int64_t side = rotate_longest(sides, m, n), count = (int64_t)m * n;
    work->a = (float *)scratch_get(&stream->scratch[SCRATCH_STEP],
                                   sizeof(float) * (size_t)rotate_scratch_floats(sides, m, n));
    if (work->a == NULL) return -1;
    work->b = work->a + count, work->c = work->b + count, work->square = work->c + count;
    work->keys = work->square + side * side, work->order = (int *)(void *)(work->keys + (m > n ? m : n));
    return 0;
}

// to (m,n) = Q_L^T from Q_R, or back: Q_L from Q_R^T. A side without basis stays. One side at least has one; to, from
// and between (m,n) are three matrices.
static inline void rotate_turn(float *to, const float *from, float *between, const RotateBasis *basis, int m, int n,
                               int back, Stream *stream) {
    if (basis->left != NULL) {
        float *left = basis->right != NULL ? between : to;
        matmul_product(left, n, basis->left, m, !back, from, n, 0, m, n, m, 0, 0, stream);
        from = left;
    }
    if (basis->right != NULL) matmul_product(to, n, from, n, 0, basis->right, n, back, m, n, n, 0, 0, stream);
}

// L = b2*L + (1-b2) G G^T, R = b2*R + (1-b2) G^T G, of gradients times scale.
static inline void rotate_moments(const RotateBasis *basis, const float *grad, int m, int n, float b2, float scale,
                                  float *square, Stream *stream) {
    if (basis->left_moment != NULL) {
        matmul_product(square, m, grad, n, 0, grad, n, 1, m, m, n, 0, 0, stream);
        vector_blend(basis->left_moment, square, b2, 1.0f - b2, scale * scale, (int64_t)m * m, stream);
    }
    if (basis->right_moment != NULL) {
        matmul_product(square, n, grad, n, 1, grad, n, 0, n, n, m, 0, 0, stream);
        vector_blend(basis->right_moment, square, b2, 1.0f - b2, scale * scale, (int64_t)n * n, stream);
    }
}

// Puts the first `count` rows (axis 0) or columns (axis 1) of v (m,n) into the order of work->order: second moments go
// with the basis vectors they belong to.
static inline void rotate_reorder(float *v, const RotateWork *work, int m, int n, int count, int axis, Stream *stream) {
    if (axis == 0) {
        rotate_gather(work->c, n, v, n, work->order, count, n, 0, stream);
        linalg_columns(v, n, work->c, n, count, n, stream);
    } else {
        rotate_gather(work->c, count, v, n, work->order, m, count, 1, stream);
        linalg_columns(v, n, work->c, count, m, count, stream);
    }
}

// The new basis of a side from `count` columns in `next` (side,count) that stand for the old basis's first ones: sorted
// by the keys, descending, v along `axis` with them; what is beyond keeps the old basis's directions; made orthonormal.
static inline int rotate_renew(float *Q, const float *next, int side, int count, float *v, int m, int n, int axis,
                               const RotateWork *work, Stream *stream) {
    rotate_order(work->order, work->keys, count, stream);
    rotate_gather(Q, side, next, count, work->order, side, count, 1, stream);
    rotate_reorder(v, work, m, n, count, axis, stream);
    return stream_check(stream) ? -1 : orthonormalize(Q, side, side, stream);
}

// One side by its second moment L (side,side). Cold: its eigenvectors, descending. Warm: one power iteration, in the
// order of lambda = diag(Q^T L Q); L Q serves both.
static inline int rotate_refresh_2nd(float *Q, const float *L, int side, RotateRefresh refresh, float *v, int m, int n,
                                     int axis, const RotateWork *work, Stream *stream) {
    if (refresh == ROTATE_COLD) return eigh(Q, work->keys, L, side, stream);
    matmul_product(work->square, side, L, side, 0, Q, side, 0, side, side, side, 0, 0, stream);
    rotate_column_dots(work->keys, Q, work->square, side, side, stream);
    return rotate_renew(Q, work->square, side, side, v, m, n, axis, work, stream);
}

// Q (side,side) = singular vectors (side,k), and where they are fewer than side, directions that complete them.
static inline int rotate_complete(float *Q, const float *vectors, int side, int k, Stream *stream) {
    if (k < side) device_zero(Q, sizeof(float) * (size_t)side * (size_t)side, stream);
    linalg_columns(Q, side, vectors, k, side, k, stream);
    return k < side ? orthonormalize(Q, side, side, stream) : stream_check(stream);
}

// Both sides by the momentum M = U diag(s) V^T. Cold: U and V. Warm: Q_L from M Q_R and Q_R from M^T Q_L, both of the
// old bases, in the order of their columns' norms; of a side alone, from M M^T Q_L or M^T M Q_R. Beyond the k =
// min(m,n) directions that M has, the longer side's basis goes on with what completes it, made orthonormal to the
// others.
static inline int rotate_refresh_1st(const RotateBasis *basis, const float *M, RotateRefresh refresh, float *v, int m,
                                     int n, const RotateWork *work, Stream *stream) {
    int k = m < n ? m : n;
    float *left = basis->left, *right = basis->right, *a = work->a, *b = work->b;
    if (refresh == ROTATE_COLD) {
        if (svd_full(a, work->keys, b, M, m, n, stream)) return -1;
        if (left != NULL && rotate_complete(left, a, m, k, stream)) return -1;
        return right != NULL ? rotate_complete(right, b, n, k, stream) : 0;
    }
    // a (m,k) for the left side, b (n,k) for the right one
    if (left != NULL && right != NULL) {
        matmul_product(a, k, M, n, 0, right, n, 0, m, k, n, 0, 0, stream);
        matmul_product(b, k, M, n, 1, left, m, 0, n, k, m, 0, 0, stream);
    } else if (left != NULL) { // k columns of a basis of m
        matmul_product(b, k, M, n, 1, left, m, 0, n, k, m, 0, 0, stream);
        matmul_product(a, k, M, n, 0, b, k, 0, m, k, n, 0, 0, stream);
    } else {
        matmul_product(a, k, M, n, 0, right, n, 0, m, k, n, 0, 0, stream);
        matmul_product(b, k, M, n, 1, a, k, 0, n, k, m, 0, 0, stream);
    }
    if (left != NULL) {
        rotate_column_dots(work->keys, a, a, m, k, stream);
        if (rotate_renew(left, a, m, k, v, m, n, 0, work, stream)) return -1;
    }
    if (right == NULL) return 0;
    rotate_column_dots(work->keys, b, b, n, k, stream);
    return rotate_renew(right, b, n, k, v, m, n, 1, work, stream);
}

static inline int rotate_refresh(const RotateBasis *basis, RotateSource source, RotateRefresh refresh, const float *M,
                                 float *v, int m, int n, const RotateWork *work, Stream *stream) {
    if (stream_check(stream)) return -1;
    if (source == ROTATE_1ST) return rotate_refresh_1st(basis, M, refresh, v, m, n, work, stream);
    if (basis->left != NULL &&
        rotate_refresh_2nd(basis->left, basis->left_moment, m, refresh, v, m, n, 0, work, stream))
        return -1;
    if (basis->right == NULL) return 0;
    return rotate_refresh_2nd(basis->right, basis->right_moment, n, refresh, v, m, n, 1, work, stream);
}

// One step of a matrix param (m,n), step counted from 1. M (m,n) is not rotated, v (m,n) is; state has
// rotate_state_floats. Without a side to rotate it is AdamW's; with identities for bases too, to the bit. Products and
// all else are fp32 whatever the stream's precision. Fails the stream: no memory, a factorization that does not
// converge.
static inline void rotate_update(float *param, const float *grad, float *M, float *v, float *state, int m, int n,
                                 const Optimizer *optimizer, RotateRefresh refresh, AdamW adam, float lr,
                                 float weight_decay, float grad_scale, int64_t step, Stream *stream) {
    RotateSides sides = rotate_sides(optimizer, m, n);
    AdamWStep at = adamw_step(adam, lr, weight_decay, grad_scale, step);
    int64_t count = (int64_t)m * n;
    RotateWork work;
    if (!sides.left && !sides.right) {
        adamw_update(param, grad, M, v, count, adam, lr, weight_decay, grad_scale, step, stream);
        return;
    }
    RotateBasis basis = rotate_basis(state, sides, optimizer->source, m, n);
    if (rotate_work(&work, sides, m, n, stream)) {
        stream->failed = 1;
        return;
    }
    vector_blend(M, grad, at.b1, 1.0f - at.b1, grad_scale, count, stream);
    rotate_moments(&basis, grad, m, n, at.b2, grad_scale, work.square, stream);
    if (refresh != ROTATE_KEEP && rotate_refresh(&basis, optimizer->source, refresh, M, v, m, n, &work, stream)) {
        stream->failed = 1;
        return;
    }
    rotate_turn(work.a, grad, work.c, &basis, m, n, 0, stream);
    rotate_turn(work.b, M, work.c, &basis, m, n, 0, stream);
    rotate_direction(work.a, work.b, v, at, count, stream);
    rotate_turn(work.b, work.a, work.c, &basis, m, n, 1, stream);
    rotate_apply(param, work.b, at.keep, count, stream);
}
