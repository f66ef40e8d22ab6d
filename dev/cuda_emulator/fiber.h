// Fibers: a CUDA thread that waits keeps its own stack, and another one goes on. A switch saves the six registers
// that a called function must keep; on machines other than x86-64 ucontext does it, slower.
// A fiber is not bound to a thread: it runs one thread after another until one of them waits.
#ifndef EMULATOR_FIBER_H
#define EMULATOR_FIBER_H

#include <sys/mman.h> // mmap, mprotect
#include <unistd.h>   // sysconf

#include "base.h" // die

#if defined(__x86_64__) && !defined(EMU_UCONTEXT) // -DEMU_UCONTEXT tries the other way here
#define EMU_JUMP 1
#else
#define EMU_JUMP 0
#include <ucontext.h> // swapcontext
#endif

namespace emu {

// The lowest page is forbidden. An odd number of pages: stacks at even distances fight for a few sets of the TLB.
constexpr size_t STACK_BYTES = (EMU_ASAN ? 65 : 33) << 12;

struct Fiber {
#if EMU_JUMP
    void *sp = nullptr;
#else
    ucontext_t context;
#endif
    char *stack = nullptr; // NULL: the host's own
    const void *bottom = nullptr;
    size_t size = 0;
    void *fake_stack = nullptr; // ASan's
    Fiber *next_free = nullptr;
};

inline Fiber host_fiber, *current_fiber = &host_fiber, *previous_fiber = nullptr, *free_fibers = nullptr;
inline char *stacks_first = nullptr; // the range of all stacks, for the fault handler
inline char *stacks_last = nullptr;
inline unsigned n_fibers = 0;

#if EMU_JUMP
// Pushes what the caller wants kept, leaves the stack pointer in *save, and continues on the other stack.
__attribute__((naked, noinline, noipa, unused)) static void fiber_jump(void ** /*save: rdi*/, void * /*to: rsi*/) {
    asm volatile("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
                 "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
                 "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
#endif

// First lines after every switch, on the new stack.
EMU_UNCHECKED inline void fiber_arrived() {
#if EMU_ASAN
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(current_fiber->fake_stack, &bottom, &size);
    if (previous_fiber != nullptr) previous_fiber->bottom = bottom, previous_fiber->size = size;
#endif
}

// Continues `to` where it left off.
EMU_UNCHECKED inline void fiber_switch(Fiber *to) {
    Fiber *from = current_fiber;
    previous_fiber = from;
    current_fiber = to;
#if EMU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->size);
#endif
#if EMU_JUMP
    fiber_jump(&from->sp, to->sp);
#else
    swapcontext(&from->context, &to->context);
#endif
    fiber_arrived();
}

// A fiber that starts in main() when it is switched to first; main must never return.
inline Fiber *fiber_new(void (*main)()) {
    Fiber *fiber = new Fiber;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *stack =
        mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE)) die("no memory for the stack of a CUDA thread");
    fiber->stack = (char *)stack;
    if (stacks_first == nullptr || fiber->stack < stacks_first) stacks_first = fiber->stack;
    if (fiber->stack + STACK_BYTES > stacks_last) stacks_last = fiber->stack + STACK_BYTES;
    // Tops at different places in their pages, for the cache's sets.
    size_t colour = (n_fibers++ * 7 % 61) * 64;
    fiber->bottom = fiber->stack + page;
    fiber->size = STACK_BYTES - page - colour;
#if EMU_JUMP
    void **top = (void **)(fiber->stack + STACK_BYTES - colour) - 2;
    top[0] = (void *)main; // where `ret` goes, with the stack as after a call; above it no return address
    top[1] = nullptr;
    fiber->sp = top - 6;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = (char *)fiber->bottom;
    fiber->context.uc_stack.ss_size = fiber->size;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, main, 0);
#endif
    return fiber;
}

EMU_UNCHECKED inline Fiber *fiber_take(void (*main)()) {
    Fiber *fiber = free_fibers;
    if (fiber == nullptr) return fiber_new(main);
    free_fibers = fiber->next_free;
    return fiber;
}

EMU_UNCHECKED inline void fiber_park(Fiber *fiber) {
    fiber->next_free = free_fibers;
    free_fibers = fiber;
}

} // namespace emu

#endif
