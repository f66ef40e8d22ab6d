// Adam in a rotated basis, the part that is the same on the CPU and on the GPU. It sees matrices only through what
// rotate.h and rotate.cuh, linalg.h and linalg.cuh both define. All pointers are the backend's memory.
//
// No include guard: each of the two includes it once, and a program that compares them has both.

// The bases of a matrix and the second moments they are learned from. NULL: that side is not rotated; no moments.
typedef struct {
    float *left, *right;               // Q_L (m,m), Q_R (n,n), a basis vector a column
    float *left_moment, *right_moment; // L (m,m), R (n,n) if bases come of second moments
} RotateBasis;

// `count` matrices (m,n) that are stepped together, `stride` floats apart in the arenas of the model and packed in a
// step's memory; their bases are `state` floats apart.
typedef struct {
    int m, n, count;
    int64_t stride, state;
} RotateGroup;

// Memory of a step. The products of a group pass through two rows of its matrices and a row of squares of the longest
// side; a refresh, in the same place, through three matrices (m,n), a square, keys of the longer side and their order.
typedef struct {
    float *first, *second;
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
static inline int rotate_work(RotateWork *work, RotateSides sides, int m, int n, int count, Stream *stream) {
    int64_t side = rotate_longest(sides, m, n), size = (int64_t)m * n;
    work->a = (float *)scratch_get(&stream->scratch[SCRATCH_STEP],
                                   sizeof(float) * (size_t)rotate_scratch_floats(sides, m, n, count));
    if (work->a == NULL) return -1;
    work->b = work->a + size, work->c = work->b + size;
    work->first = work->a, work->second = work->a + count * size;
    work->square = work->a + rotate_scratch_matrices(count) * size;
    work->keys = work->square + count * side * side, work->order = (int *)(void *)(work->keys + (m > n ? m : n));
    return 0;
}

// to (m,n) = Q_L^T from Q_R, or back: Q_L from Q_R^T, for a group whose matrices are from_stride apart in `from`,
// packed in `to` and between. A side without basis stays, one side at least has one. to may be `from` where both have;
// it is neither otherwise.
static inline void rotate_turn(float *to, const float *from, int64_t from_stride, float *between,
                               const RotateBasis *basis, const RotateGroup *group, int back, Stream *stream) {
    int m = group->m, n = group->n;
    int64_t size = (int64_t)m * n;
    if (basis->left != NULL) {
        float *left = basis->right != NULL ? between : to;
        matmul_batch(left, n, size, basis->left, m, group->state, !back, from, n, from_stride, 0, m, n, m, group->count,
                     stream);
        from = left, from_stride = size;
    }
    if (basis->right != NULL)
        matmul_batch(to, n, size, from, n, from_stride, 0, basis->right, n, group->state, back, m, n, n, group->count,
                     stream);
}

// moment = b2*moment + (1-b2) * scale^2 G G^T if axis is 0, of G^T G if it is 1, of gradients G (m,n). Symmetric, so
// the blocks above the diagonal are left alone: ROTATE_BLOCK rows at a time. square: as many squares as matrices.
static inline void rotate_moment(float *moment, const float *grad, int axis, const RotateGroup *group, float b2,
                                 float scale, float *square, Stream *stream) {
    int n = group->n, side = axis == 0 ? group->m : n, inner = axis == 0 ? n : group->m;
    int64_t size = (int64_t)side * side;
    for (int64_t i = 0; i < side; i += ROTATE_BLOCK) {
        int64_t rows = side - i < ROTATE_BLOCK ? side - i : (int64_t)ROTATE_BLOCK;
        matmul_batch(square, side, size, grad + (axis == 0 ? i * n : i), n, group->stride, axis, grad, n, group->stride,
                     !axis, rows, i + rows, inner, group->count, stream);
        for (int k = 0; k < group->count; k++)
            rotate_blend(moment + k * group->state + i * side, square + k * size, side, rows, i + rows, b2, 1.0f - b2,
                         scale * scale, stream);
    }
}

// Both second moments, as far as there are any.
static inline void rotate_moments(const RotateBasis *basis, const float *grad, const RotateGroup *group, float b2,
                                  float scale, float *square, Stream *stream) {
    if (basis->left_moment != NULL) rotate_moment(basis->left_moment, grad, 0, group, b2, scale, square, stream);
    if (basis->right_moment != NULL) rotate_moment(basis->right_moment, grad, 1, group, b2, scale, square, stream);
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

// One side by its second moment L (side,side), of which what is above the diagonal may be old. Cold: its eigenvectors,
// descending. Warm: one power iteration, in the order of lambda = diag(Q^T L Q); L Q serves both.
static inline int rotate_refresh_2nd(float *Q, float *L, int side, RotateRefresh refresh, float *v, int m, int n,
                                     int axis, const RotateWork *work, Stream *stream) {
    if (refresh == ROTATE_COLD) return eigh(Q, work->keys, L, side, stream);
    rotate_mirror(L, side, stream);
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

// New bases of one matrix, from moments that have this step's gradient: M (m,n) comes out of the old bases, is blended
// with the gradient, and goes into the new ones. Before the first refresh it is in none.
static inline int rotate_rebase(const RotateBasis *basis, RotateSource source, RotateRefresh refresh, float *M,
                                const float *grad, float *v, AdamWStep at, const RotateGroup *one,
                                const RotateWork *work, Stream *stream) {
    int64_t size = (int64_t)one->m * one->n;
    if (refresh == ROTATE_WARM) {
        rotate_turn(work->a, M, size, work->c, basis, one, 1, stream);
        device_copy(M, work->a, sizeof(float) * (size_t)size, stream);
    }
    vector_blend(M, grad, at.b1, 1.0f - at.b1, at.grad_scale, size, stream);
    if (rotate_refresh(basis, source, refresh, M, v, one->m, one->n, work, stream)) return -1;
    rotate_turn(work->a, M, size, work->c, basis, one, 0, stream);
    device_copy(M, work->a, sizeof(float) * (size_t)size, stream);
    return 0;
}

// rotate_rebase for those of a group that are due.
static inline int rotate_rebase_due(float *state, RotateSides sides, RotateSource source, const RotateRefresh *refresh,
                                    float *M, const float *grad, float *v, AdamWStep at, const RotateGroup *group,
                                    const RotateWork *work, Stream *stream) {
    RotateGroup one = *group;
    one.count = 1;
    for (int i = 0; i < group->count; i++) {
        int64_t from = i * group->stride;
        RotateBasis basis = rotate_basis(state + i * group->state, sides, source, group->m, group->n);
        if (refresh[i] != ROTATE_KEEP &&
            rotate_rebase(&basis, source, refresh[i], M + from, grad + from, v + from, at, &one, work, stream))
            return -1;
    }
    return 0;
}

// One step of `count` matrices param (m,n), `stride` floats apart as are grad, M and v, step counted from 1. From the
// first refresh on M is kept in the bases, as v is; state has rotate_state_floats a matrix; refresh (count). Without a
// side to rotate it is AdamW's; with identities for bases too, to the bit. Products and all else are fp32 whatever the
// stream's precision. Fails the stream: no memory, a factorization that does not converge.
static inline void rotate_update_group(float *param, const float *grad, float *M, float *v, float *state, int m, int n,
                                       int count, int64_t stride, const Optimizer *optimizer,
                                       const RotateRefresh *refresh, AdamW adam, float lr, float weight_decay,
                                       float grad_scale, int64_t step, Stream *stream) {
    RotateSides sides = rotate_sides(optimizer, m, n);
    AdamWStep at = adamw_step(adam, lr, weight_decay, grad_scale, step);
    int64_t size = (int64_t)m * n;
    RotateGroup group = {m, n, count, stride, rotate_state_floats(sides, optimizer->source, m, n)};
    RotateWork work;
    if (!sides.left && !sides.right) {
        for (int64_t i = 0, from = 0; i < count; i++, from += stride)
            adamw_update(param + from, grad + from, M + from, v + from, size, adam, lr, weight_decay, grad_scale, step,
                         stream);
        return;
    }
    RotateBasis basis = rotate_basis(state, sides, optimizer->source, m, n);
    if (rotate_work(&work, sides, m, n, count, stream)) {
        stream->failed = 1;
        return;
    }
    rotate_moments(&basis, grad, &group, at.b2, grad_scale, work.square, stream);
    if (rotate_rebase_due(state, sides, optimizer->source, refresh, M, grad, v, at, &group, &work, stream)) {
        stream->failed = 1;
        return;
    }
    float *direction = work.first, *update = sides.left && sides.right ? work.first : work.second;
    rotate_turn(direction, grad, stride, work.second, &basis, &group, 0, stream);
    for (int i = 0; i < count; i++)
        rotate_direction(direction + i * size, M + i * stride, v + i * stride, at, refresh[i] != ROTATE_KEEP, size,
                         stream);
    rotate_turn(update, direction, size, work.second, &basis, &group, 1, stream);
    for (int i = 0; i < count; i++) rotate_apply(param + i * stride, update + i * size, at.keep, size, stream);
}

// The same for one matrix.
static inline void rotate_update(float *param, const float *grad, float *M, float *v, float *state, int m, int n,
                                 const Optimizer *optimizer, RotateRefresh refresh, AdamW adam, float lr,
                                 float weight_decay, float grad_scale, int64_t step, Stream *stream) {
    rotate_update_group(param, grad, M, v, state, m, n, 1, 0, optimizer, &refresh, adam, lr, weight_decay, grad_scale,
                        step, stream);
}
