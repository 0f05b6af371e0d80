/*
Fibers: functions that can stop in the middle and go on later. Each thread of a block is one, on a stack of its own.
    fiber_start(f, run)   prepare f to call run() when it is first resumed
    fiber_resume(f)       from the scheduler: run f until it calls fiber_yield() or returns
    fiber_yield(f)        from the fiber: back to the scheduler
Stacks end in a page that no one may touch, so that an endless recursion is seen. x86-64 switches with ten instructions;
other machines with the C library's swapcontext, which costs two system calls.
*/
#ifndef SIMT_FIBER_H
#define SIMT_FIBER_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

enum { FIBER_STACK = 256 << 10, FIBER_GUARD = 4096 };  // only touched pages cost memory

struct Fiber {
    char* stack;       // FIBER_GUARD bytes that no one may touch, then FIBER_STACK bytes
    void (*run)();
    int finished;
#if defined(__x86_64__)
    void* sp;          // where it stopped
#else
    ucontext_t context;
#endif
    void* fake_stack;  // the sanitizer's own
};

// the scheduler's side: one per process, for kernels run one after the other
struct FiberHome {
    Fiber* running;
#if defined(__x86_64__)
    void* sp;
#else
    ucontext_t context;
#endif
    void* fake_stack;
    const void* stack;
    size_t stack_bytes;
};
inline FiberHome fiber_home;

// ---- the sanitizer must know on which stack we are ----

#if defined(__SANITIZE_ADDRESS__)
static inline void fiber_leave_(void** fake_stack, const void* stack, size_t n_bytes) {
    __sanitizer_start_switch_fiber(fake_stack, stack, n_bytes);
}
static inline void fiber_arrive_(void* fake_stack, const void** stack, size_t* n_bytes) {
    __sanitizer_finish_switch_fiber(fake_stack, stack, n_bytes);
}
#else
static inline void fiber_leave_(void**, const void*, size_t) {}
static inline void fiber_arrive_(void*, const void**, size_t*) {}
#endif

// ---- the switch ----

#if defined(__x86_64__)
// save what a called function must keep (System V ABI), swap stacks, take the other side's back
extern "C" void simt_switch(void** save_sp, void* load_sp);
__asm__(
    ".text\n.weak simt_switch\n.type simt_switch, @function\nsimt_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n    ret\n"
    ".size simt_switch, . - simt_switch\n");
#define FIBER_SWITCH(from, to) simt_switch(&(from).sp, (to).sp)
#else
#define FIBER_SWITCH(from, to) swapcontext(&(from).context, &(to).context)
#endif

static inline void fiber_yield(Fiber* f) {
    fiber_leave_(f->finished ? nullptr : &f->fake_stack, fiber_home.stack, fiber_home.stack_bytes);
    FIBER_SWITCH(*f, fiber_home);
    fiber_arrive_(f->fake_stack, &fiber_home.stack, &fiber_home.stack_bytes);
}

static inline void fiber_main_() {
    fiber_arrive_(nullptr, &fiber_home.stack, &fiber_home.stack_bytes);
    Fiber* f = fiber_home.running;
    f->run();
    f->finished = 1;
    fiber_yield(f);
    abort();  // a finished fiber is never resumed
}

static inline void fiber_start(Fiber* f, void (*run)()) {
    if (!f->stack) {
        f->stack = (char*)mmap(NULL, FIBER_GUARD + FIBER_STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f->stack == MAP_FAILED) { perror("simt: no memory for the stack of a thread"); exit(1); }
        mprotect(f->stack, FIBER_GUARD, PROT_NONE);
    }
    f->run = run;
    f->finished = 0;
#if defined(__x86_64__)
    void** end = (void**)(f->stack + FIBER_GUARD + FIBER_STACK);
    end[-1] = NULL;                           // fiber_main_ begins as if called: 8 bytes off a multiple of 16, nowhere to return to
    end[-2] = (void*)fiber_main_;             // where `ret` of simt_switch goes
    memset(end - 8, 0, 6 * sizeof(void*));    // the six registers that it takes back before
    f->sp = end - 8;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack + FIBER_GUARD;
    f->context.uc_stack.ss_size = FIBER_STACK;
    f->context.uc_link = NULL;
    makecontext(&f->context, fiber_main_, 0);
#endif
}

static inline void fiber_resume(Fiber* f) {
    fiber_home.running = f;
    fiber_leave_(&fiber_home.fake_stack, f->stack + FIBER_GUARD, FIBER_STACK);
    FIBER_SWITCH(fiber_home, *f);
    fiber_arrive_(fiber_home.fake_stack, nullptr, nullptr);
}
#endif  // SIMT_FIBER_H
