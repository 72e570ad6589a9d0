/* What the files of the stand-in CUDA driver share. See cuda_standin.c. */
#ifndef KVRAIL_CUDA_STANDIN_H
#define KVRAIL_CUDA_STANDIN_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    CANNOT_MAP = 205,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

#define API __attribute__((visibility("default")))

/* Begins every function of the driver: counts the call and does what the control file says. */
#define CALL(name)                                 \
    do {                                           \
        CUresult refused = standin_call(#name, 0); \
        if (refused) return refused;               \
    } while (0)

/* As CALL, for what needs a current context. */
#define CALL_IN_CONTEXT(name)                      \
    do {                                           \
        CUresult refused = standin_call(#name, 1); \
        if (refused) return refused;               \
    } while (0)

struct context {
    int device, references;
};

/* cuda_standin.c: the control file, devices and contexts. */
CUresult standin_call(const char *name, int in_context);
long standin_setting(const char *key, long otherwise);
/* A line of the log: `call` or `ran`, and the name of a function. */
void standin_log(const char *what, const char *name);
/* Returns when nothing holds asynchronous operations of this name. */
void standin_hold(const char *name);
/* Milliseconds that an asynchronous operation of this name waits before it runs. */
long standin_late(const char *name);
/* The error that such an operation ends the context with; 0 for none. */
int standin_loses(const char *name);
void standin_lose(int result);
int standin_lost(void);
CUcontext standin_current(void);
void standin_pause(long milliseconds);

/* cuda_standin_memory.c */
extern pthread_mutex_t standin_memory_lock;
/* Where a copy finds the bytes of device memory; NULL where nothing is mapped or may be touched.
   Under the lock. */
char *standin_device_bytes(CUdeviceptr pointer, size_t len);
/* Holds the lock from here to the end of the block. */
#define LOCKED \
    __attribute__((cleanup(standin_unlock))) int locked = pthread_mutex_lock(&standin_memory_lock)
static inline void standin_unlock(int *locked) {
    if (*locked == 0) pthread_mutex_unlock(&standin_memory_lock);
}

/* cuda_standin_host.c */
/* Whether host memory is registered. Under the lock. */
int standin_host_registered(const void *pointer, size_t len);

#endif
