// Rotated Adam: its ops, and whole steps with cold and warm refreshes, against the CPU's. Signs of basis vectors may
// differ, so parameters are compared. Must fail for: columns for rows in a gather, a lane left out of the sums, V in
// the old order, a refresh of the other side's basis; keys in ascending order; a lower triangle that is overwritten,
// the bases of a group's first matrix for all of it.
#include "../../llmc/optimizer.h"

namespace cpu {
#include "../../llmc/rotate.h"
}
#include "../../llmc/rotate.cuh"

static void rotate_order_case(int n) {
    float *keys = host_random(n, 401, 1.0f);
    for (int i = 0; i < n; i += 3) keys[i] = keys[n / 2]; // equal ones
    if (n > 4) keys[1] = NAN, keys[2] = INFINITY, keys[4] = NAN;
    int *expected = (int *)calloc((size_t)n, sizeof(int)), *order = device_nan<int>(n);
    float *on = device_of_host(keys, n);
    rotate_order(order, on, n, test_stream);
    cpu::rotate_order(expected, keys, n, test_cpu_stream);
    int *ours = host_of_device(order, n);
    check_same(ours, expected, sizeof(int) * (size_t)n, "order");
    device_release(order, n, "order");
    device_release(on, n, "keys");
    free(ours);
    free(expected);
    free(keys);
}

static void rotate_dots_case(int rows, int cols) {
    int64_t count = (int64_t)rows * cols;
    float *a = host_random(count, 402, 1.0f), *b = host_random(count, 403, 1.0f), *expected = host_nan(cols);
    float *on_a = device_of_host(a, count), *on_b = device_of_host(b, count), *out = device_nan<float>(cols);
    rotate_column_dots(out, on_a, on_b, rows, cols, test_stream);
    cpu::rotate_column_dots(expected, a, b, rows, cols, test_cpu_stream);
    check_device(out, expected, cols, 1e-7, "column sums");
    device_release(on_a, count, "a");
    device_release(on_b, count, "b");
    free(a);
    free(b);
}

// The matrices have wider rows than what is gathered.
static void rotate_gather_case(int rows, int cols, int axis) {
    int n = axis == 0 ? rows : cols, ldf = cols + 3, ldt = cols + 2;
    int64_t from_count = (int64_t)rows * ldf, to_count = (int64_t)rows * ldt;
    int *order = (int *)calloc((size_t)n, sizeof(int));
    for (int i = 0; i < n; i++) order[i] = (i * 7 + 3) % n;
    float *from = host_random(from_count, 404, 1.0f), *to = host_random(to_count, 405, 1.0f);
    float *on_from = device_of_host(from, from_count), *on_to = device_of_host(to, to_count);
    int *on_order = device_of_host(order, n);
    rotate_gather(on_to, ldt, on_from, ldf, on_order, rows, cols, axis, test_stream);
    cpu::rotate_gather(to, ldt, from, ldf, order, rows, cols, axis, test_cpu_stream);
    float *ours = host_of_device(on_to, to_count);
    check_same(ours, to, sizeof(float) * (size_t)to_count, "gather");
    device_release(on_from, from_count, "from");
    device_release(on_to, to_count, "to");
    device_release(on_order, n, "order");
    free(ours);
    free(from);
    free(to);
    free(order);
}

// A region of wider matrices blended, a square mirrored.
static void rotate_square_cases(void) {
    static const int sizes[] = {1, 31, 32, 33, 70};
    for (int n : sizes) {
        int64_t count = (int64_t)n * n;
        float *to = host_random(count, 406, 1.0f), *x = host_random(count, 407, 1.0f);
        float *on_to = device_of_host(to, count), *on_x = device_of_host(x, count);
        int width = (n + 1) / 2;
        rotate_blend(on_to + n / 2, on_x + n / 2, n, width, width, 0.9f, 0.1f, 0.25f, test_stream);
        cpu::rotate_blend(to + n / 2, x + n / 2, n, width, width, 0.9f, 0.1f, 0.25f, test_cpu_stream);
        rotate_mirror(on_to, n, test_stream);
        cpu::rotate_mirror(to, n, test_cpu_stream);
        check_device(on_to, to, count, 1e-7, "blended, then mirrored");
        device_release(on_x, count, "x");
        free(x);
    }
}

// moment (n,n) = a symmetric matrix whose eigenvalues are well apart
static void rotate_moment(float *moment, int n, uint32_t sub) {
    if (moment == NULL) return;
    float *Q = host_random((int64_t)n * n, sub, 1.0f);
    check(cpu::orthonormalize(Q, n, n, test_cpu_stream) == 0, "%s", error_message);
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0.0;
            for (int k = 0; k < n; k++) sum += (double)Q[i * n + k] * (double)Q[j * n + k] * (k + 1);
            moment[i * n + j] = (float)sum;
        }
    }
    free(Q);
}

// M out of the bases of state
static void rotate_out(float *M, float *state, int m, int n, const Optimizer *optimizer) {
    RotateSides sides = rotate_sides(optimizer, m, n);
    cpu::RotateBasis basis = cpu::rotate_basis(state, sides, optimizer->source, m, n);
    cpu::RotateGroup one = {m, n, 1, 0, 0};
    float *out = host_nan((int64_t)m * n), *between = host_nan((int64_t)m * n);
    if (!sides.left && !sides.right) memcpy(out, M, sizeof(float) * (size_t)m * (size_t)n);
    cpu::rotate_turn(out, M, 0, between, &basis, &one, 1, test_cpu_stream);
    memcpy(M, out, sizeof(float) * (size_t)m * (size_t)n);
    free(out);
    free(between);
}

static void rotate_case(int m, int n, RotateSource source, RotateGeometry geometry, int max_dim, int offset) {
    enum { STEPS = 7, EVERY = 3 };
    Optimizer optimizer = {OPTIMIZER_ROTATE, source, geometry, REFRESH_UNIFORM, EVERY, max_dim};
    AdamW adam = {0.9f, 0.95f, 0.05f}; // a smaller eps lets the few quotients by about 0 decide
    RotateSides sides = rotate_sides(&optimizer, m, n);
    int64_t count = (int64_t)m * n, all = count + offset, floats = rotate_state_floats(sides, source, m, n);
    float *start = host_random(all, 410, 1.0f), *param = host_random(all, 410, 1.0f);
    float *M = host_random(count, 411, 0.3f), *v = host_random(count, 411, 0.0f), *state = host_random(floats, 1, 0.0f);
    cpu::RotateBasis basis = cpu::rotate_basis(state, sides, source, m, n);
    rotate_moment(basis.left_moment, m, 412);
    rotate_moment(basis.right_moment, n, 413);
    float *on_param = device_of_host(param, all), *on_M = device_of_host(M, count), *on_v = device_of_host(v, count);
    float *on_state = device_of_host(state, floats);
    for (int step = 1; step <= STEPS; step++) {
        float *grad = host_random(count, 414 + (uint32_t)step, 1.0f), *on_grad = device_of_host(grad, count);
        int due = rotate_is_due(&optimizer, 0, 1, step, 0);
        RotateRefresh refresh = step == 1 ? ROTATE_COLD : due ? ROTATE_WARM : ROTATE_KEEP;
        rotate_update(on_param + offset, on_grad, on_M, on_v, on_state, m, n, &optimizer, refresh, adam, 0.1f, 0.3f,
                      0.5f, step, test_stream);
        cpu::rotate_update(param + offset, grad, M, v, state, m, n, &optimizer, refresh, adam, 0.1f, 0.3f, 0.5f, step,
                           test_cpu_stream);
        check(stream_check(test_stream) == 0 && cpu::stream_check(test_cpu_stream) == 0, "%s", error_message);
        device_release(on_grad, count, "grad");
        free(grad);
    }
    float *ours = host_of_device(on_param, all);
    check_same(ours, start, sizeof(float) * (size_t)offset, "in front");
    for (int64_t i = 0; i < all; i++) ours[i] -= start[i], param[i] -= start[i];
    check_close(ours + offset, param + offset, count, 2e-4, "the change of param");
    float *our_M = host_of_device(on_M, count), *our_state = host_of_device(on_state, floats);
    rotate_out(our_M, our_state, m, n, &optimizer);
    rotate_out(M, state, m, n, &optimizer);
    check_close(our_M, M, count, 2e-6, "M");
    check_device(on_v, v, count, 2e-3, "V");
    device_release(on_param, all, "param");
    device_release(on_state, floats, "state");
    device_release(on_M, count, "M");
    free(our_M);
    free(our_state);
    free(M);
    free(ours);
    free(param);
    free(start);
    free(state);
}

// Matrices that are stepped together, some of which get new bases.
static void rotate_group_case(RotateSource source, RotateGeometry geometry) {
    enum { M = 7, N = 9, COUNT = 3, STRIDE = M * N + 5, ALL = COUNT * STRIDE };
    static const RotateRefresh refresh[2][COUNT] = {{ROTATE_COLD, ROTATE_COLD, ROTATE_COLD},
                                                    {ROTATE_KEEP, ROTATE_WARM, ROTATE_KEEP}};
    Optimizer optimizer = {OPTIMIZER_ROTATE, source, geometry, REFRESH_UNIFORM, 3, 4096};
    AdamW adam = {0.9f, 0.95f, 0.05f};
    int64_t each = rotate_state_floats(rotate_sides(&optimizer, M, N), source, M, N), floats = COUNT * each;
    float *param = host_random(ALL, 420, 1.0f), *m = host_random(ALL, 421, 0.3f), *v = host_random(ALL, 421, 0.0f);
    float *state = host_random(floats, 1, 0.0f), *start = host_random(ALL, 420, 1.0f);
    for (int i = 0; i < COUNT; i++) {
        cpu::RotateBasis basis = cpu::rotate_basis(state + i * each, rotate_sides(&optimizer, M, N), source, M, N);
        rotate_moment(basis.left_moment, M, 422 + (uint32_t)i);
        rotate_moment(basis.right_moment, N, 425 + (uint32_t)i);
    }
    float *on_param = device_of_host(param, ALL), *on_m = device_of_host(m, ALL), *on_v = device_of_host(v, ALL);
    float *on_state = device_of_host(state, floats);
    for (int step = 1; step <= 2; step++) {
        float *grad = host_random(ALL, 428 + (uint32_t)step, 1.0f), *on_grad = device_of_host(grad, ALL);
        rotate_update_group(on_param, on_grad, on_m, on_v, on_state, M, N, COUNT, STRIDE, &optimizer, refresh[step - 1],
                            adam, 0.1f, 0.3f, 0.5f, step, test_stream);
        for (int i = 0; i < COUNT; i++)
            cpu::rotate_update(param + i * STRIDE, grad + i * STRIDE, m + i * STRIDE, v + i * STRIDE, state + i * each,
                               M, N, &optimizer, refresh[step - 1][i], adam, 0.1f, 0.3f, 0.5f, step, test_cpu_stream);
        check(stream_check(test_stream) == 0, "%s", error_message);
        device_release(on_grad, ALL, "grad");
        free(grad);
    }
    float *ours = host_of_device(on_param, ALL);
    for (int64_t i = 0; i < ALL; i++) ours[i] -= start[i], param[i] -= start[i];
    check_close(ours, param, ALL, 2e-4, "the change of a group");
    check_device(on_v, v, ALL, 2e-3, "V of a group");
    device_release(on_param, ALL, "param");
    device_release(on_m, ALL, "M");
    device_release(on_state, floats, "state");
    float *all[] = {ours, param, start, m, state};
    for (float *values : all) free(values);
}

static void test_cuda_rotate(void) {
    static const int shapes[][2] = {{1, 1}, {5, 3}, {3, 5}, {12, 12}, {40, 33}, {33, 40}};
    static const int orders[] = {1, 5, 33, 256, 257, 600};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) rotate_order_case(orders[i]);
    rotate_dots_case(1, 1);
    rotate_dots_case(7, 33);
    rotate_dots_case(70, 64);
    for (int axis = 0; axis < 2; axis++) rotate_gather_case(1, 1, axis), rotate_gather_case(23, 40, axis);
    rotate_square_cases();
    for (int way = 0; way < 4; way++) rotate_group_case((RotateSource)(way / 2), (RotateGeometry)(way % 2));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int way = 0; way < 4; way++)
            rotate_case(shapes[i][0], shapes[i][1], (RotateSource)(way / 2), (RotateGeometry)(way % 2), 4096, 0);
    rotate_case(40, 9, ROTATE_2ND, ROTATE_BI, 20, 0); // the smaller side alone
    rotate_case(40, 9, ROTATE_2ND, ROTATE_BI, 4, 0);  // none
    rotate_case(7, 9, ROTATE_2ND, ROTATE_BI, 4096, 1);
}
