/* A runtime and driver with 64 MiB, for tests: allocations are addresses, not memory. */
#include <stdint.h>
#include <string.h>
#include <stddef.h>

#define CAPACITY (64ull << 20)
static uint64_t used, next = 0x7f0000000000ull;
static struct { uint64_t address, size; } blocks[100000];
static int count;

static int take(void **address, size_t size) {
    if (used + size > CAPACITY) return 2;
    used += size;
    *address = (void *)next;
    blocks[count % 100000].address = next;
    blocks[count++ % 100000].size = size;
    next += size + 512;
    return 0;
}
static int give(void *address) {
    for (int i = count - 1; i >= 0 && i > count - 100000; i--)
        if (blocks[i % 100000].address == (uint64_t)address) {
            used -= blocks[i % 100000].size;
            blocks[i % 100000].address = 0;
            return 0;
        }
    return address ? 1 : 0;
}
int cudaMalloc(void **a, size_t size) { return take(a, size); }
int cudaFree(void *a) { return give(a); }
int cudaMallocAsync(void **a, size_t size, void *stream) { (void)stream; return take(a, size); }
int cudaFreeAsync(void *a, void *stream) { (void)stream; return give(a); }
/* The pool keeps 4 MiB more than is used. */
int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    (void)pool;
    if (attribute != 5 && attribute != 7) return 1;
    *(uint64_t *)value = attribute == 5 ? used + (4ull << 20) : used;
    return 0;
}
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaMemGetInfo(size_t *f, size_t *t) { *f = CAPACITY - used; *t = CAPACITY; return 0; }

static uint64_t handles;
int cuMemCreate(uint64_t *h, size_t size, const void *p, unsigned long long f) {
    (void)p; (void)f;
    if (used + size > CAPACITY) return 2;
    used += size;
    *h = ++handles;
    return 0;
}
int cuMemMap(uint64_t a, size_t s, size_t o, uint64_t h, unsigned long long f) {
    (void)a; (void)s; (void)o; (void)h; (void)f;
    return 0;
}
int cuMemUnmap(uint64_t a, size_t s) { (void)a; (void)s; return 0; }
int cuMemRelease(uint64_t h) { (void)h; return 0; }

int cuGetProcAddress_v2(const char *name, void **f, int v, uint64_t flags, void *status);
static void *find(const char *name) {
    if (!strcmp(name, "cuMemCreate")) return (void *)cuMemCreate;
    if (!strcmp(name, "cuMemMap")) return (void *)cuMemMap;
    if (!strcmp(name, "cuMemUnmap")) return (void *)cuMemUnmap;
    if (!strcmp(name, "cuMemRelease")) return (void *)cuMemRelease;
    return NULL;
}
int cuGetProcAddress_v2(const char *name, void **f, int v, uint64_t flags, void *status) {
    (void)v; (void)flags; (void)status;
    *f = find(name);
    return *f ? 0 : 500;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v,
                                     unsigned long long flags, void *status) {
    (void)v; (void)flags; (void)status;
    *f = find(name);
    return *f ? 0 : 500;
}
