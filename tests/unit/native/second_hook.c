/* Another tool's hook in LD_PRELOAD: counts, and passes on to whoever is next. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
static int calls;
int cudaMalloc(void **a, size_t size) {
    int (*next)(void **, size_t) = dlsym(RTLD_NEXT, "cudaMalloc");
    calls++;
    return next(a, size);
}
__attribute__((destructor)) static void leave(void) { fprintf(stderr, "second saw %d\n", calls); }
