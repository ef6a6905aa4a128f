/* The allocation hook: interposed in front of CUDA's allocation calls by LD_PRELOAD.
 *
 * It links nothing of CUDA. Every call is passed on to the library that the program itself has
 * loaded; before an allocation the compiled rules of the control file are evaluated, and an
 * enforcing rule that holds refuses the call with error 2 (out of memory), which frameworks
 * answer by releasing their cache, trying again, and raising an error that can be caught.
 *
 * Two files are shared with mmctl (layout: layout.py, checked by a test):
 *   control  $MMCTL_HOOK_CONTROL, written by mmctl: mode, rules, and inputs such as token counts
 *   state    $MMCTL_HOOK_FOLDER/hook-PID, written here: counters, events, the map of segments
 * The state is made at the first CUDA call, so that a process without CUDA leaves no trace.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAGIC 0x4b484c54434d4dULL /* "MMCTLHK" */
#define VERSION 2
#define INPUTS 32
#define RULES 4
#define INSTRUCTIONS 64
#define RING 16384
#define SLOTS 65536
#define OUT_OF_MEMORY 2
#define NOT_INITIALISED 3

enum mode { OFF, OBSERVE, ENFORCE };
enum action { SEGMENT_ALLOC = 1, SEGMENT_FREE, MAP, UNMAP, OOM, REFUSED, WOULD_REFUSE };
enum op { END, COMPARE_INPUT, INPUT, CONSTANT, COMPARE, AND, OR, NOT, ADD, SUBTRACT, MULTIPLY,
          DIVIDE, NEGATE, JUMP_IF_FALSE, JUMP_IF_TRUE, ALL };
/* Inputs that the hook itself knows; the others come from mmctl. */
enum input { SIZE_BYTES, RESERVED_BYTES, DEVICE_FREE_BYTES, FIRST_GIVEN };

struct input_value { double value; int64_t ts_ns; };
struct instruction { uint8_t op, comparison; uint16_t input; uint32_t jump; double constant; };
struct rule {
    char name[40];
    uint32_t mode, length;
    int64_t max_age_ns, reserved;
    struct instruction code[INSTRUCTIONS];
};
struct control {
    uint64_t magic;
    _Atomic uint32_t generation; /* odd while mmctl writes */
    uint32_t mode, rule_count, unused[3];
    struct input_value inputs[INPUTS];
    struct rule rules[RULES];
};
struct event {
    int64_t ts_ns;
    uint64_t address, size, stream;
    uint32_t action;
    int32_t device;
    uint32_t rule, unused;
};
struct segment { uint64_t address, size; int32_t device, unused; };
struct state {
    uint64_t magic;
    uint32_t version, pid;
    int64_t started_ns;
    uint64_t calls, refused_calls, trips, would_trips;
    uint64_t reserved_bytes, peak_bytes, segments_live, segments_lost;
    uint64_t total_bytes, free_bytes;
    int64_t free_ts_ns;
    uint64_t pool_reserved_bytes, pool_used_bytes; /* of the pool that was asked for last */
    _Atomic uint64_t head; /* events written since the start */
    struct event ring[RING];
    struct segment segments[SLOTS];
};

/* Sizes and offsets, for the test that compares them with layout.py. */
EXPORT const uint64_t mmctl_layout[] = {
    sizeof(struct control), offsetof(struct control, inputs), offsetof(struct control, rules),
    sizeof(struct rule), offsetof(struct rule, code), sizeof(struct instruction),
    sizeof(struct state), offsetof(struct state, head), offsetof(struct state, ring),
    sizeof(struct event), offsetof(struct state, segments), sizeof(struct segment),
};

static struct control *control;
static struct state *state;
static struct rule rules[RULES];
static uint32_t rule_count, rules_generation, run_mode;
static atomic_flag lock = ATOMIC_FLAG_INIT;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static _Atomic int disabled;
static __thread int current_device;
static __thread int64_t last_refusal_ns;
static __thread uint64_t last_refused_size;

static void take(void) {
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {}
}
static void give(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- finding the real functions ------------------------------------------------------- */

typedef void *(*dlsym_t)(void *, const char *);

static dlsym_t real_dlsym(void) {
    static _Atomic(dlsym_t) found;
    dlsym_t f = atomic_load_explicit(&found, memory_order_relaxed);
    if (f == NULL) {
        static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
        for (unsigned i = 0; f == NULL && i < 3; i++)
            f = (dlsym_t)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        atomic_store_explicit(&found, f, memory_order_relaxed);
    }
    return f;
}

struct search { const char *name, *library; void *found; };

static int look(struct dl_phdr_info *info, size_t size, void *data) {
    struct search *s = data;
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, s->library) == NULL) return 0;
    void *handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL) return 0;
    s->found = real_dlsym()(handle, s->name);
    dlclose(handle);
    return s->found != NULL;
}

/* The next definition after this library; else the one of a library that the program loaded for
 * itself alone (as Python loads an extension), which RTLD_NEXT does not see. */
static void *resolve(const char *name, const char *library) {
    void *found = real_dlsym()(RTLD_NEXT, name);
    if (found == NULL) {
        struct search s = {name, library, NULL};
        dl_iterate_phdr(look, &s);
        found = s.found;
    }
    return found;
}

#define REAL(type, name, library)                                                      \
    static _Atomic(type) real_##name;                                                  \
    static type get_##name(void) {                                                     \
        type f = atomic_load_explicit(&real_##name, memory_order_relaxed);             \
        if (f == NULL) {                                                               \
            f = (type)resolve(#name, library);                                         \
            atomic_store_explicit(&real_##name, f, memory_order_relaxed);              \
        }                                                                              \
        return f;                                                                      \
    }

typedef int (*malloc_t)(void **, size_t);
typedef int (*free_t)(void *);
typedef int (*malloc_async_t)(void **, size_t, void *);
typedef int (*free_async_t)(void *, void *);
typedef int (*mem_info_t)(size_t *, size_t *);
typedef int (*pool_attribute_t)(void *, int, void *);
typedef int (*set_device_t)(int);
typedef int (*entry_by_version_t)(const char *, void **, unsigned, unsigned long long, void *);
typedef int (*entry_t)(const char *, void **, unsigned long long, void *);
typedef int (*proc_address_t)(const char *, void **, int, uint64_t);
typedef int (*proc_address_v2_t)(const char *, void **, int, uint64_t, void *);
typedef int (*mem_create_t)(uint64_t *, size_t, const void *, unsigned long long);
typedef int (*mem_map_t)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
typedef int (*mem_unmap_t)(uint64_t, size_t);
typedef int (*mem_release_t)(uint64_t);

REAL(malloc_t, cudaMalloc, "libcudart")
REAL(free_t, cudaFree, "libcudart")
REAL(malloc_async_t, cudaMallocAsync, "libcudart")
REAL(free_async_t, cudaFreeAsync, "libcudart")
REAL(mem_info_t, cudaMemGetInfo, "libcudart")
REAL(pool_attribute_t, cudaMemPoolGetAttribute, "libcudart")
REAL(set_device_t, cudaSetDevice, "libcudart")
REAL(entry_by_version_t, cudaGetDriverEntryPointByVersion, "libcudart")
REAL(entry_t, cudaGetDriverEntryPoint, "libcudart")
REAL(proc_address_t, cuGetProcAddress, "libcuda.so")
REAL(proc_address_v2_t, cuGetProcAddress_v2, "libcuda.so")
REAL(mem_create_t, cuMemCreate, "libcuda.so")
REAL(mem_map_t, cuMemMap, "libcuda.so")
REAL(mem_unmap_t, cuMemUnmap, "libcuda.so")
REAL(mem_release_t, cuMemRelease, "libcuda.so")

/* ---- shared memory --------------------------------------------------------------------- */

static void *map_file(const char *path, int flags, size_t size, int prot) {
    int file = open(path, flags | O_CLOEXEC, 0600);
    if (file < 0) return NULL;
    void *found = NULL;
    if (!(flags & O_CREAT) || ftruncate(file, (off_t)size) == 0) {
        off_t length = lseek(file, 0, SEEK_END);
        if (length >= (off_t)size) found = mmap(NULL, size, prot, MAP_SHARED, file, 0);
    }
    close(file);
    return found == MAP_FAILED ? NULL : found;
}

static void state_path(char *path, size_t size) {
    const char *folder = getenv("MMCTL_HOOK_FOLDER");
    snprintf(path, size, "%s/hook-%d", folder ? folder : "/dev/shm", (int)getpid());
}

static void in_child(void) {
    /* The child has its own segments: none yet. */
    state = NULL;
    atomic_flag_clear(&lock);
}

static void prepare(void) {
    const char *path = getenv("MMCTL_HOOK_CONTROL");
    if (path != NULL) control = map_file(path, O_RDONLY, sizeof *control, PROT_READ);
    if (control != NULL && control->magic != MAGIC) control = NULL;
    pthread_atfork(NULL, NULL, in_child);
}

/* Called with the lock held. */
static struct state *open_state(void) {
    if (state == NULL && !atomic_load_explicit(&disabled, memory_order_relaxed)) {
        char path[512];
        state_path(path, sizeof path);
        unlink(path);
        state = map_file(path, O_RDWR | O_CREAT | O_EXCL, sizeof *state, PROT_READ | PROT_WRITE);
        if (state == NULL) {
            atomic_store(&disabled, 1); /* nowhere to write: the program runs on unseen */
            return NULL;
        }
        state->version = VERSION;
        state->pid = (uint32_t)getpid();
        state->started_ns = now_ns(CLOCK_REALTIME);
        state->magic = MAGIC;
    }
    return state;
}

__attribute__((destructor)) static void leave(void) {
    if (state != NULL && state->pid == (uint32_t)getpid()) {
        char path[512];
        state_path(path, sizeof path);
        unlink(path);
    }
}

/* Called with the lock held: a private copy of the rules whenever mmctl has written new ones. */
static void reload_rules(void) {
    uint32_t before = atomic_load_explicit(&control->generation, memory_order_acquire);
    if (before == rules_generation || (before & 1)) return;
    uint32_t count = control->rule_count, mode = control->mode;
    if (count > RULES) return;
    memcpy(rules, control->rules, sizeof rules);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&control->generation, memory_order_relaxed) != before) return;
    for (uint32_t i = 0; i < count; i++)
        if (rules[i].length > INSTRUCTIONS) return;
    rule_count = count;
    run_mode = mode;
    rules_generation = before;
}

static void note(enum action action, uint64_t address, uint64_t size, uint64_t stream,
                 uint32_t rule, int64_t now) {
    uint64_t head = atomic_load_explicit(&state->head, memory_order_relaxed);
    struct event *e = &state->ring[head % RING];
    *e = (struct event){now, address, size, stream, action, current_device, rule, 0};
    atomic_store_explicit(&state->head, head + 1, memory_order_release);
}

static uint32_t slot_of(uint64_t address) {
    return (uint32_t)((address >> 9) * 0x9E3779B97F4A7C15ULL >> 48);
}

static void remember(uint64_t address, uint64_t size) {
    uint32_t slot = slot_of(address);
    if (state->segments_live >= SLOTS / 2) {
        state->segments_lost++;
        return;
    }
    while (state->segments[slot].address != 0) slot = (slot + 1) % SLOTS;
    state->segments[slot] = (struct segment){address, size, current_device, 0};
    state->segments_live++;
    state->reserved_bytes += size;
    if (state->reserved_bytes > state->peak_bytes) state->peak_bytes = state->reserved_bytes;
}

/* Size of the segment that is forgotten, 0 for one that was never seen. */
static uint64_t forget(uint64_t address) {
    uint32_t slot = slot_of(address);
    while (state->segments[slot].address != address) {
        if (state->segments[slot].address == 0) return 0;
        slot = (slot + 1) % SLOTS;
    }
    uint64_t size = state->segments[slot].size;
    state->segments[slot].address = 0;
    state->segments_live--;
    state->reserved_bytes -= size;
    /* Close the gap, so that what was pushed past it is still found. */
    for (uint32_t next = (slot + 1) % SLOTS; state->segments[next].address != 0;
         next = (next + 1) % SLOTS) {
        uint32_t home = slot_of(state->segments[next].address);
        if ((uint16_t)(next - home) >= (uint16_t)(next - slot)) {
            state->segments[slot] = state->segments[next];
            state->segments[next].address = 0;
            slot = next;
        }
    }
    return size;
}

/* ---- the rule -------------------------------------------------------------------------- */

static inline double read_input(unsigned input, uint64_t size, int64_t max_age_ns, int64_t *now) {
    if (input == SIZE_BYTES) return (double)size;
    if (input == RESERVED_BYTES) return state ? (double)state->reserved_bytes : __builtin_nan("");
    int64_t at;
    double value;
    if (input == DEVICE_FREE_BYTES && state != NULL && state->free_ts_ns != 0) {
        value = (double)state->free_bytes;
        at = state->free_ts_ns;
    } else if (control != NULL && input < INPUTS) {
        value = control->inputs[input].value;
        at = control->inputs[input].ts_ns;
    } else
        return __builtin_nan("");
    if (at == 0) return __builtin_nan("");
    /* The coarse clock is some milliseconds behind and five times as fast. */
    if (*now == 0) *now = now_ns(CLOCK_REALTIME_COARSE);
    return *now - at <= max_age_ns ? value : __builtin_nan("");
}

static inline double compared(unsigned comparison, double a, double b) {
    if (a != a || b != b) return __builtin_nan("");
    switch (comparison) {
    case 0: return a < b;
    case 1: return a <= b;
    case 2: return a > b;
    case 3: return a >= b;
    case 4: return a == b;
    default: return a != b;
    }
}

/* 1, 0, or not a number for unknown, as Kleene's logic has it. */
static double evaluate(const struct rule *rule, uint64_t size) {
    double stack[INSTRUCTIONS + 2], a, b;
    int top = -1;
    int64_t now = 0;
    for (uint32_t i = 0; i < rule->length; i++) {
        const struct instruction *in = &rule->code[i];
        switch (in->op) {
        case COMPARE_INPUT:
            a = read_input(in->input, size, rule->max_age_ns, &now);
            stack[++top] = compared(in->comparison, a, in->constant);
            continue;
        case INPUT: stack[++top] = read_input(in->input, size, rule->max_age_ns, &now); continue;
        case CONSTANT: stack[++top] = in->constant; continue;
        case NOT:
            if (top < 0) return __builtin_nan("");
            if (stack[top] == stack[top]) stack[top] = stack[top] == 0;
            continue;
        case NEGATE:
            if (top < 0) return __builtin_nan("");
            stack[top] = -stack[top];
            continue;
        case ALL: /* the next comparisons joined by and: the usual rule, without a stack */
            a = 1;
            for (uint32_t end = i + in->jump; i < end && i + 1 < rule->length;) {
                const struct instruction *part = &rule->code[++i];
                double value = read_input(part->input, size, rule->max_age_ns, &now);
                double truth = compared(part->comparison, value, part->constant);
                if (truth == 0) {
                    a = 0;
                    i = end;
                } else if (truth != truth)
                    a = truth;
            }
            stack[++top] = a;
            continue;
        case JUMP_IF_FALSE:
            if (top >= 0 && stack[top] == 0 && in->jump > i) i = in->jump - 1;
            continue;
        case JUMP_IF_TRUE:
            if (top >= 0 && stack[top] == 1 && in->jump > i) i = in->jump - 1;
            continue;
        case END: return top < 0 ? __builtin_nan("") : stack[top];
        default: break;
        }
        if (top < 1) return __builtin_nan("");
        b = stack[top--];
        a = stack[top];
        switch (in->op) {
        case COMPARE: a = compared(in->comparison, a, b); break;
        case AND: a = a == 0 || b == 0 ? 0 : a != a || b != b ? __builtin_nan("") : 1; break;
        case OR: a = a == 1 || b == 1 ? 1 : a != a || b != b ? __builtin_nan("") : 0; break;
        case ADD: a = a + b; break;
        case SUBTRACT: a = a - b; break;
        case MULTIPLY: a = a * b; break;
        case DIVIDE: a = b == 0 ? __builtin_nan("") : a / b; break;
        default: return __builtin_nan("");
        }
        stack[top] = a;
    }
    return top < 0 ? __builtin_nan("") : stack[top];
}

/* For the benchmark: what one evaluation of the rules of a control file gives. */
EXPORT double mmctl_evaluate(uint64_t size) {
    pthread_once(&prepared, prepare);
    if (control == NULL) return __builtin_nan("");
    reload_rules();
    return rule_count ? evaluate(&rules[0], size) : __builtin_nan("");
}

/* Whether to refuse an allocation; takes the lock. A retry of the same size within a second is
 * the same trip. */
static int refuse(uint64_t size) {
    int refused = 0;
    pthread_once(&prepared, prepare);
    take();
    if (open_state() != NULL) {
        state->calls++;
        if (control != NULL) {
            reload_rules();
            for (uint32_t i = 0; run_mode != OFF && i < rule_count && !refused; i++) {
                if (evaluate(&rules[i], size) != 1) continue;
                int64_t now = now_ns(CLOCK_REALTIME);
                int again = last_refused_size == size && now - last_refusal_ns < 1000000000;
                refused = run_mode == ENFORCE && rules[i].mode == ENFORCE;
                last_refusal_ns = now;
                last_refused_size = size;
                if (refused) state->refused_calls++;
                if (!again) {
                    note(refused ? REFUSED : WOULD_REFUSE, 0, size, 0, i, now);
                    if (refused) state->trips++;
                    else state->would_trips++;
                }
            }
        }
    }
    give();
    return refused;
}

static void took(enum action action, uint64_t address, uint64_t size, uint64_t stream) {
    take();
    if (open_state() != NULL && address != 0) {
        remember(address, size);
        note(action, address, size, stream, 0, now_ns(CLOCK_REALTIME));
    }
    give();
}

static void failed(uint64_t size, uint64_t stream) {
    take();
    if (open_state() != NULL) note(OOM, 0, size, stream, 0, now_ns(CLOCK_REALTIME));
    give();
}

static void gave(enum action action, uint64_t address, uint64_t stream) {
    pthread_once(&prepared, prepare);
    take();
    if (address != 0 && open_state() != NULL) {
        uint64_t size = forget(address);
        if (size != 0) note(action, address, size, stream, 0, now_ns(CLOCK_REALTIME));
    }
    give();
}

/* ---- the runtime's calls --------------------------------------------------------------- */

EXPORT int cudaMalloc(void **address, size_t size) {
    malloc_t real = get_cudaMalloc();
    if (real == NULL) return NOT_INITIALISED;
    if (refuse(size)) return OUT_OF_MEMORY;
    int code = real(address, size);
    if (code == 0) took(SEGMENT_ALLOC, (uint64_t)*address, size, 0);
    else if (code == OUT_OF_MEMORY) failed(size, 0);
    return code;
}

EXPORT int cudaFree(void *address) {
    free_t real = get_cudaFree();
    if (real == NULL) return NOT_INITIALISED;
    /* Forgotten first: once freed, another thread may be given the same address. */
    gave(SEGMENT_FREE, (uint64_t)address, 0);
    return real(address);
}

EXPORT int cudaMallocAsync(void **address, size_t size, void *stream) {
    malloc_async_t real = get_cudaMallocAsync();
    if (real == NULL) return NOT_INITIALISED;
    if (refuse(size)) return OUT_OF_MEMORY;
    int code = real(address, size, stream);
    if (code == 0) took(SEGMENT_ALLOC, (uint64_t)*address, size, (uint64_t)stream);
    else if (code == OUT_OF_MEMORY) failed(size, (uint64_t)stream);
    return code;
}

EXPORT int cudaFreeAsync(void *address, void *stream) {
    free_async_t real = get_cudaFreeAsync();
    if (real == NULL) return NOT_INITIALISED;
    gave(SEGMENT_FREE, (uint64_t)address, (uint64_t)stream);
    return real(address, stream);
}

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    mem_info_t real = get_cudaMemGetInfo();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(free_bytes, total_bytes);
    if (code == 0 && free_bytes != NULL && total_bytes != NULL) {
        pthread_once(&prepared, prepare);
        take();
        if (open_state() != NULL) {
            state->free_bytes = *free_bytes;
            state->total_bytes = *total_bytes;
            state->free_ts_ns = now_ns(CLOCK_REALTIME);
        }
        give();
    }
    return code;
}

/* What cudaFreeAsync gives back stays with the driver's pool; how much it keeps is seen when the
 * program asks: attributes 5 (reserved now) and 7 (used now), of which each brings the other. */
EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    pool_attribute_t real = get_cudaMemPoolGetAttribute();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(pool, attribute, value);
    uint64_t other = 0;
    if (code != 0 || value == NULL || (attribute != 5 && attribute != 7)) return code;
    if (real(pool, 12 - attribute, &other) != 0) return code;
    pthread_once(&prepared, prepare);
    take();
    if (open_state() != NULL) {
        uint64_t asked = *(uint64_t *)value;
        state->pool_reserved_bytes = attribute == 5 ? asked : other;
        state->pool_used_bytes = attribute == 5 ? other : asked;
    }
    give();
    return code;
}

EXPORT int cudaSetDevice(int device) {
    set_device_t real = get_cudaSetDevice();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(device);
    if (code == 0) current_device = device;
    return code;
}

/* ---- the driver's virtual memory, however the program came by it ------------------------ */

static int hook_cuMemCreate(uint64_t *handle, size_t size, const void *p, unsigned long long f) {
    mem_create_t real = get_cuMemCreate();
    if (real == NULL) return NOT_INITIALISED;
    if (refuse(size)) return OUT_OF_MEMORY;
    int code = real(handle, size, p, f);
    if (code == OUT_OF_MEMORY) failed(size, 0);
    return code;
}

static int hook_cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
                         unsigned long long flags) {
    mem_map_t real = get_cuMemMap();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(address, size, offset, handle, flags);
    if (code == 0) took(MAP, address, size, 0);
    return code;
}

static int hook_cuMemUnmap(uint64_t address, size_t size) {
    mem_unmap_t real = get_cuMemUnmap();
    if (real == NULL) return NOT_INITIALISED;
    /* One call may unmap what several mapped, side by side. */
    uint64_t end = address + size;
    for (uint64_t at = address; at < end;) {
        take();
        uint64_t length = open_state() != NULL ? forget(at) : 0;
        if (length != 0) note(UNMAP, at, length, 0, 0, now_ns(CLOCK_REALTIME));
        give();
        if (length == 0) break;
        at += length;
    }
    return real(address, size);
}

static int hook_cuMemRelease(uint64_t handle) {
    mem_release_t real = get_cuMemRelease();
    return real == NULL ? NOT_INITIALISED : real(handle);
}

EXPORT int cuMemCreate(uint64_t *h, size_t size, const void *p, unsigned long long flags) {
    return hook_cuMemCreate(h, size, p, flags);
}
EXPORT int cuMemMap(uint64_t a, size_t size, size_t offset, uint64_t h, unsigned long long f) {
    return hook_cuMemMap(a, size, offset, h, f);
}
EXPORT int cuMemUnmap(uint64_t address, size_t size) { return hook_cuMemUnmap(address, size); }
EXPORT int cuMemRelease(uint64_t handle) { return hook_cuMemRelease(handle); }

static int hook_cuGetProcAddress(const char *, void **, int, uint64_t);
static int hook_cuGetProcAddress_v2(const char *, void **, int, uint64_t, void *);

/* Our function in the place of ``found``, which is remembered as the real one. */
static void *instead(const char *name, void *found) {
    if (found == NULL || name[0] != 'c' || name[1] != 'u') return found;
#define INSTEAD(function, type)                                                        \
    if (strcmp(name, #function) == 0) {                                                \
        if (found != (void *)hook_##function && found != (void *)function)             \
            atomic_store(&real_##function, (type)found);                               \
        return (void *)hook_##function;                                                \
    }
    INSTEAD(cuMemCreate, mem_create_t)
    INSTEAD(cuMemMap, mem_map_t)
    INSTEAD(cuMemUnmap, mem_unmap_t)
    INSTEAD(cuMemRelease, mem_release_t)
    return found;
}

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                            unsigned long long flags, void *status) {
    entry_by_version_t real = get_cudaGetDriverEntryPointByVersion();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(name, found, version, flags, status);
    if (code == 0 && found != NULL) *found = instead(name, *found);
    return code;
}

EXPORT int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags,
                                   void *status) {
    entry_t real = get_cudaGetDriverEntryPoint();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(name, found, flags, status);
    if (code == 0 && found != NULL) *found = instead(name, *found);
    return code;
}

static void *proc_address_instead(const char *name, void *found) {
    if (found != NULL && name != NULL && strcmp(name, "cuGetProcAddress") == 0) return found;
    return instead(name, found);
}

static int hook_cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    proc_address_t real = get_cuGetProcAddress();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(name, found, version, flags);
    if (code == 0 && found != NULL) *found = proc_address_instead(name, *found);
    return code;
}

static int hook_cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                                    void *status) {
    proc_address_v2_t real = get_cuGetProcAddress_v2();
    if (real == NULL) return NOT_INITIALISED;
    int code = real(name, found, version, flags, status);
    if (code == 0 && found != NULL) *found = proc_address_instead(name, *found);
    return code;
}

EXPORT int cuGetProcAddress(const char *n, void **found, int version, uint64_t flags) {
    return hook_cuGetProcAddress(n, found, version, flags);
}
EXPORT int cuGetProcAddress_v2(const char *n, void **found, int version, uint64_t f, void *s) {
    return hook_cuGetProcAddress_v2(n, found, version, f, s);
}

/* dlsym finds its caller by the return address: the real one is entered by a jump, never by a
 * call from here, or RTLD_NEXT would mean the library after this one. */
EXPORT void *dlsym(void *handle, const char *name) {
    dlsym_t real = real_dlsym();
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || name[0] != 'c' ||
        name[1] != 'u')
        return real(handle, name);
    void *found = real(handle, name);
    if (found == NULL) return NULL;
    if (strcmp(name, "cuGetProcAddress") == 0) {
        if (found != (void *)cuGetProcAddress) atomic_store(&real_cuGetProcAddress, found);
        return (void *)hook_cuGetProcAddress;
    }
    if (strcmp(name, "cuGetProcAddress_v2") == 0) {
        if (found != (void *)cuGetProcAddress_v2) atomic_store(&real_cuGetProcAddress_v2, found);
        return (void *)hook_cuGetProcAddress_v2;
    }
    return instead(name, found);
}
