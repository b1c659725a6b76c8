// Drives ggml's barrier, cut from ggml-cpu.c into barrier_cut.h, in the ways that test_barrier.py names.
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syscall.h>
#include <time.h>
#include <unistd.h>

#define GGML_THREADPOOL_N_THREADS_MASK (0xffffU)
#define MIN(a, b) ((a) < (b) ? (a) : (b))

struct ggml_threadpool {
    atomic_int n_graph, n_barrier, n_asleep, n_barrier_passed;
};

static atomic_int rounds; // spun in the present wait, where one thread waits
static atomic_bool vain;  // each look at the clock is a long time after the one before
static bool real;         // the clock is the machine's

static void ggml_thread_cpu_relax(void) {
    if (!real) {
        atomic_fetch_add(&rounds, 1);
        sched_yield();
    }
}

static int64_t ggml_time_us(void) {
    static _Thread_local int64_t now = 1;
    if (real) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
    }
    return now += vain ? 1000000 : 0;
}

#include "barrier_cut.h"

static struct ggml_threadpool pool;

// --- several graphs on threads that stay, as ggml's own pool has them: a thread may still leave when the next one begins

#define THREADS 12
#define BARRIERS 60

static int written[2][THREADS];
static int graphs;

static void work(unsigned * seed) {
    *seed = *seed * 1103515245u + 12345u;
    unsigned kind = *seed >> 24;
    if (kind < 2) {
        usleep(300);
    } else if (kind < 64) {
        sched_yield();
    } else {
        for (volatile unsigned i = 0; i < kind; i++) {}
    }
}

static void compute(int ith, int graph, unsigned * seed) {
    int nth = atomic_load(&pool.n_graph) & GGML_THREADPOOL_N_THREADS_MASK;
    for (int i = 0; i < BARRIERS; i++) {
        int step = graph * BARRIERS + i;
        written[i % 2][ith] = step;
        work(seed);
        ggml_barrier(&pool);
        for (int j = 0; j < nth; j++) {
            if (written[i % 2][j] != step) {
                printf("thread %d passed barrier %d before thread %d came\n", ith, step, j);
                exit(1);
            }
        }
    }
    ggml_barrier(&pool);
}

static void * worker(void * arg) {
    int ith = (int) (intptr_t) arg, last = 0;
    unsigned seed = 7919u * ith;
    while (true) {
        int n_graph = atomic_load(&pool.n_graph);
        if (n_graph == last) {
            sched_yield();
        } else if (n_graph < 0) {
            return NULL;
        } else {
            last = n_graph;
            if (ith < (int) (n_graph & GGML_THREADPOOL_N_THREADS_MASK)) {
                compute(ith, n_graph >> 16, &seed);
            }
        }
    }
}

static void storm(void) {
    real = true;
    pthread_t threads[THREADS];
    for (int i = 1; i < THREADS; i++) {
        pthread_create(&threads[i], NULL, worker, (void *) (intptr_t) i);
    }
    unsigned seed = 1;
    for (int graph = 1; graph <= graphs; graph++) {
        int nth = 2 + (graph * 5) % (THREADS - 1);
        atomic_store(&pool.n_graph, graph << 16 | nth);
        compute(0, graph, &seed);
    }
    atomic_store(&pool.n_graph, -1);
    for (int i = 1; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("%d asleep\n", atomic_load(&pool.n_asleep));
}

// --- one thread waits; this one comes last, when the other sleeps or, with `early`, spins

static atomic_int left; // waits the other one has passed
static int spun[4096];

static void * waiter(void * arg) {
    for (int i = 0; i < (int) (intptr_t) arg; i++) {
        ggml_barrier(&pool);
        spun[i] = atomic_exchange(&rounds, 0);
        atomic_fetch_add(&left, 1);
    }
    return NULL;
}

static void come_last(int from, int to, bool early) {
    vain = !early;
    for (int i = from; i < to; i++) {
        while (atomic_load(&pool.n_asleep) == 0 && !(early && atomic_load(&rounds) > 0)) {
            sched_yield();
        }
        ggml_barrier(&pool);
        while (atomic_load(&left) == i) {
            sched_yield();
        }
    }
}

static void waits(int asleep, int soon) {
    atomic_store(&pool.n_graph, 2);
    pthread_t thread;
    pthread_create(&thread, NULL, waiter, (void *) (intptr_t) (asleep + soon));
    come_last(0, asleep, false);
    come_last(asleep, asleep + soon, true);
    pthread_join(thread, NULL);
    for (int i = 0; i < asleep + soon; i++) {
        printf("%d ", spun[i]);
    }
    printf("\n");
}

int main(int argc, char ** argv) {
    alarm(1000); // a lost wake-up would be waited for without end
    if (argc == 3 && strcmp(argv[1], "storm") == 0) {
        graphs = atoi(argv[2]);
        storm();
    } else {
        waits(atoi(argv[2]), atoi(argv[3]));
    }
    return 0;
}
