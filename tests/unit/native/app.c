/* A program that allocates as it is told on standard input, one command a line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *);
int cudaMemGetInfo(size_t *, size_t *);
int cudaSetDevice(int);
int cudaMemPoolGetAttribute(void *, int, void *);
int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, void *);

static void *kept[1000];
static int count;

static void *busy(void *unused) {
    (void)unused;
    for (int i = 0; i < 1000; i++) {
        void *a = NULL;
        if (cudaMalloc(&a, 512) == 0) cudaFree(a);
    }
    return NULL;
}
static double ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static double loop(int (*take)(void **, size_t), int (*give)(void *), int n) {
    double start = ns();
    for (int i = 0; i < n; i++) {
        void *a = NULL;
        take(&a, 4096);
        give(a);
    }
    return (ns() - start) / n;
}
static int virtual_memory(void *create_, void *map_, uint64_t size) {
    int (*create)(uint64_t *, size_t, const void *, unsigned long long) = create_;
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long) = map_;
    uint64_t handle = 0;
    int code = create(&handle, size, NULL, 0);
    return code ? code : map(0x600000000000ull + (uint64_t)count++ * (1 << 30), size, 0, handle, 0);
}

int main(int argc, char **argv) {
    char word[32];
    unsigned long long n;
    setvbuf(stdout, NULL, _IOLBF, 0);
    (void)argc;
    while (scanf("%31s %llu", word, &n) == 2) {
        void *a = NULL;
        if (!strcmp(word, "malloc")) {
            int code = cudaMalloc(&a, n);
            if (!code) kept[count++] = a;
            printf("%d\n", code);
        } else if (!strcmp(word, "async")) {
            int code = cudaMallocAsync(&a, n, (void *)7);
            if (!code) kept[count++] = a;
            printf("%d\n", code);
        } else if (!strcmp(word, "free")) {
            printf("%d\n", cudaFree(kept[n]));
        } else if (!strcmp(word, "device")) {
            printf("%d\n", cudaSetDevice((int)n));
        } else if (!strcmp(word, "info")) {
            size_t f, t;
            printf("%d\n", cudaMemGetInfo(&f, &t));
        } else if (!strcmp(word, "pool")) {
            uint64_t value;
            printf("%d\n", cudaMemPoolGetAttribute(NULL, (int)n, &value));
        } else if (!strcmp(word, "entry")) {
            void *create, *map;
            cudaGetDriverEntryPointByVersion("cuMemCreate", &create, 12000, 0, NULL);
            cudaGetDriverEntryPointByVersion("cuMemMap", &map, 12000, 0, NULL);
            printf("%d\n", virtual_memory(create, map, n));
        } else if (!strcmp(word, "dlsym") || !strcmp(word, "proc")) {
            void *library = dlopen("libcuda.so.1", RTLD_NOW), *create = NULL, *map = NULL;
            if (!strcmp(word, "dlsym")) {
                create = dlsym(library, "cuMemCreate");
                map = dlsym(library, "cuMemMap");
            } else {
                int (*get)(const char *, void **, int, uint64_t, void *) =
                    dlsym(library, "cuGetProcAddress_v2");
                get("cuMemCreate", &create, 12000, 0, NULL);
                get("cuMemMap", &map, 12000, 0, NULL);
            }
            printf("%d\n", virtual_memory(create, map, n));
        } else if (!strcmp(word, "threads")) {
            pthread_t thread[16];
            for (unsigned i = 0; i < n; i++) pthread_create(&thread[i], NULL, busy, NULL);
            for (unsigned i = 0; i < n; i++) pthread_join(thread[i], NULL);
            printf("0\n");
        } else if (!strcmp(word, "fork")) {
            pid_t child = fork();
            if (child == 0) {
                int code = cudaMalloc(&a, n);
                char path[512];
                snprintf(path, sizeof path, "%s/hook-%d", getenv("MMCTL_HOOK_FOLDER"), getpid());
                printf("%d\n", code ? code : access(path, F_OK) ? 99 : 0);
                exit(0);
            }
            waitpid(child, NULL, 0);
        } else if (!strcmp(word, "exec")) {
            /* The same program, started anew without any CUDA call. */
            if (fork() == 0) execl(argv[0], argv[0], NULL);
            wait(NULL);
            printf("0\n");
        } else if (!strcmp(word, "bench")) {
            void *library = dlopen(FAKE, RTLD_NOW | RTLD_NOLOAD);
            int (*take)(void **, size_t) = dlsym(library, "cudaMalloc");
            int (*give)(void *) = dlsym(library, "cudaFree");
            double bare = 1e9, hooked = 1e9;
            for (int i = 0; i < 5; i++) {
                double b = loop(take, give, (int)n), h = loop(cudaMalloc, cudaFree, (int)n);
                if (b < bare) bare = b;
                if (h < hooked) hooked = h;
            }
            double rule = 1e9;
            double (*evaluate)(uint64_t) = dlsym(RTLD_DEFAULT, "mmctl_evaluate");
            for (int k = 0; evaluate && k < 5; k++) {
                double start = ns();
                for (unsigned i = 0; i < n; i++) evaluate(20 << 20);
                double one = (ns() - start) / n;
                if (one < rule) rule = one;
            }
            printf("%.1f %.1f %.1f\n", bare, hooked, rule);
        }
    }
    return 7;
}
