/* The stand-in driver's streams and events. Each stream has a thread, so that what is asynchronous
   really is. */
#define _GNU_SOURCE
#include "cuda_standin.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Records of an event, asked for and run; shared with other processes where it is for them. */
struct records {
    _Atomic unsigned long asked, run;
};

struct event {
    struct records *records;
    int file;
};

/* One end of a copy. */
struct place {
    int device;
    CUdeviceptr pointer;
    size_t pitch;
};

struct operation {
    struct operation *next;
    enum { COPY, RECORD, WAIT } kind;
    /* The function that asked for it. */
    const char *name;
    struct place from, to;
    size_t width, height;
    struct event *event;
    unsigned long number;
    long late;
    int lose, corrupt;
};

struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct operation *first, **last;
    int busy, ending;
};

struct ipc_event {
    char magic[8];
    int pid, file;
    char reserved[48];
};

struct copy_2d {
    size_t from_x, from_y;
    int from_kind;
    const void *from_host;
    CUdeviceptr from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_kind;
    void *to_host;
    CUdeviceptr to_device;
    void *to_array;
    size_t to_pitch, width, height;
};

enum { HOST = 1, DEVICE = 2, POLL_US = 50 };

static const char MAGIC[8] = "event";

static char *bytes(const struct place *place, size_t row, size_t width) {
    CUdeviceptr pointer = place->pointer + row * place->pitch;
    return place->device ? standin_device_bytes(pointer, width) : (char *)(uintptr_t)pointer;
}

static void copy(const struct operation *operation) {
    pthread_mutex_lock(&standin_memory_lock);
    for (size_t row = 0; row < operation->height; row++) {
        char *from = bytes(&operation->from, row, operation->width);
        char *to = bytes(&operation->to, row, operation->width);
        if (!from || !to) {
            standin_lose(ILLEGAL_ADDRESS);
            break;
        }
        memcpy(to, from, operation->width);
        if (operation->corrupt) to[0]++;
    }
    pthread_mutex_unlock(&standin_memory_lock);
}

static void run(struct stream *stream, struct operation *operation) {
    standin_hold(operation->name);
    if (operation->late) standin_pause(operation->late);
    if (operation->lose) standin_lose(operation->lose);
    switch (operation->kind) {
    case COPY:
        if (!standin_lost()) copy(operation);
        standin_log("ran", operation->name);
        break;
    case RECORD:
        /* Before anybody can see it. */
        standin_log("ran", operation->name);
        if (!standin_lost()) atomic_store(&operation->event->records->run, operation->number);
        break;
    case WAIT:
        while (!standin_lost() && !stream->ending &&
               atomic_load(&operation->event->records->run) < operation->number)
            usleep(POLL_US);
        standin_log("ran", operation->name);
    }
}

static void *work(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ending)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct operation *operation = stream->first;
        if (!operation) break;
        stream->first = operation->next;
        if (!stream->first) stream->last = &stream->first;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        run(stream, operation);
        free(operation);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static CUresult enqueue(CUstream stream, const char *name, struct operation operation) {
    if (!stream) return INVALID_HANDLE;
    struct operation *made = malloc(sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    *made = operation;
    made->next = NULL;
    made->name = name;
    made->late = standin_late(name);
    made->lose = standin_loses(name);
    made->corrupt = standin_setting("corrupt", 0) != 0;
    pthread_mutex_lock(&stream->lock);
    *stream->last = made;
    stream->last = &made->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

API CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    CALL_IN_CONTEXT(cuStreamCreate);
    if (flags > 1) return INVALID_VALUE;
    struct stream *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    made->last = &made->first;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    if (pthread_create(&made->thread, NULL, work, made) != 0) {
        free(made);
        return OUT_OF_MEMORY;
    }
    *out = made;
    return SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
    CALL_IN_CONTEXT(cuStreamDestroy_v2);
    if (!stream) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream) {
    CALL_IN_CONTEXT(cuStreamSynchronize);
    if (!stream) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return standin_lost();
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CALL_IN_CONTEXT(cuStreamWaitEvent);
    if (flags || !event) return INVALID_VALUE;
    unsigned long number = atomic_load(&event->records->asked);
    return enqueue(stream, "cuStreamWaitEvent",
                   (struct operation){.kind = WAIT, .event = event, .number = number});
}

static CUresult event_of(CUevent *out, int file) {
    struct event *made = malloc(sizeof *made);
    void *shared = mmap(NULL, sizeof(struct records), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (!made || shared == MAP_FAILED) {
        free(made);
        close(file);
        return OUT_OF_MEMORY;
    }
    *made = (struct event){shared, file};
    *out = made;
    return SUCCESS;
}

API CUresult cuEventCreate(CUevent *out, unsigned flags) {
    CALL_IN_CONTEXT(cuEventCreate);
    /* For other processes (4) only without times (2). */
    if (flags > 7 || ((flags & 4) && !(flags & 2))) return INVALID_VALUE;
    int file = memfd_create("event", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(struct records)) != 0) return OUT_OF_MEMORY;
    return event_of(out, file);
}

API CUresult cuEventDestroy_v2(CUevent event) {
    CALL_IN_CONTEXT(cuEventDestroy_v2);
    if (!event) return INVALID_HANDLE;
    /* What was recorded may still run: the few bytes stay. */
    close(event->file);
    return SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    CALL_IN_CONTEXT(cuEventRecord);
    if (!event) return INVALID_HANDLE;
    unsigned long number = atomic_fetch_add(&event->records->asked, 1) + 1;
    return enqueue(stream, "cuEventRecord",
                   (struct operation){.kind = RECORD, .event = event, .number = number});
}

static int complete(CUevent event) {
    return atomic_load(&event->records->run) >= atomic_load(&event->records->asked);
}

API CUresult cuEventQuery(CUevent event) {
    CALL(cuEventQuery);
    if (!event) return INVALID_HANDLE;
    return complete(event) ? SUCCESS : NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event) {
    CALL(cuEventSynchronize);
    if (!event) return INVALID_HANDLE;
    while (!standin_lost() && !complete(event)) usleep(POLL_US);
    return standin_lost();
}

API CUresult cuIpcGetEventHandle(struct ipc_event *handle, CUevent event) {
    CALL_IN_CONTEXT(cuIpcGetEventHandle);
    *handle = (struct ipc_event){.pid = getpid(), .file = event->file};
    memcpy(handle->magic, MAGIC, sizeof MAGIC);
    return SUCCESS;
}

API CUresult cuIpcOpenEventHandle(CUevent *out, struct ipc_event handle) {
    CALL_IN_CONTEXT(cuIpcOpenEventHandle);
    if (memcmp(handle.magic, MAGIC, sizeof MAGIC) != 0) return INVALID_HANDLE;
    if (handle.pid == getpid()) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    return file < 0 ? CANNOT_MAP : event_of(out, file);
}

/* Host memory that takes part in an asynchronous copy is registered, or the copy is refused. */
static CUresult check(const struct operation *copy) {
    CUresult result = SUCCESS;
    pthread_mutex_lock(&standin_memory_lock);
    for (size_t row = 0; row < copy->height; row++)
        for (int end = 0; end < 2; end++) {
            const struct place *place = end ? &copy->to : &copy->from;
            CUdeviceptr pointer = place->pointer + row * place->pitch;
            int fine = place->device
                           ? standin_device_bytes(pointer, copy->width) != NULL
                           : standin_host_registered((void *)(uintptr_t)pointer, copy->width);
            if (!fine) result = INVALID_VALUE;
        }
    pthread_mutex_unlock(&standin_memory_lock);
    return result;
}

static CUresult enqueue_copy(CUstream stream, const char *name, struct operation operation) {
    CUresult result = check(&operation);
    return result ? result : enqueue(stream, name, operation);
}

static struct operation row(struct place from, struct place to, size_t len) {
    return (struct operation){.kind = COPY, .from = from, .to = to, .width = len, .height = 1};
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t len, CUstream stream) {
    CALL_IN_CONTEXT(cuMemcpyHtoDAsync_v2);
    struct place source = {0, (CUdeviceptr)(uintptr_t)from, 0}, target = {1, to, 0};
    return enqueue_copy(stream, "cuMemcpyHtoDAsync_v2", row(source, target, len));
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t len, CUstream stream) {
    CALL_IN_CONTEXT(cuMemcpyDtoHAsync_v2);
    struct place source = {1, from, 0}, target = {0, (CUdeviceptr)(uintptr_t)to, 0};
    return enqueue_copy(stream, "cuMemcpyDtoHAsync_v2", row(source, target, len));
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream stream) {
    CALL_IN_CONTEXT(cuMemcpyDtoDAsync_v2);
    struct place source = {1, from, 0}, target = {1, to, 0};
    return enqueue_copy(stream, "cuMemcpyDtoDAsync_v2", row(source, target, len));
}

API CUresult cuMemcpy2DAsync_v2(const struct copy_2d *copy, CUstream stream) {
    CALL_IN_CONTEXT(cuMemcpy2DAsync_v2);
    if (copy->from_kind < HOST || copy->from_kind > DEVICE || copy->to_kind < HOST ||
        copy->to_kind > DEVICE)
        return INVALID_VALUE;
    if (copy->width > copy->from_pitch || copy->width > copy->to_pitch) return INVALID_VALUE;
    struct place from = {copy->from_kind == DEVICE,
                         copy->from_kind == DEVICE ? copy->from_device
                                                   : (CUdeviceptr)(uintptr_t)copy->from_host,
                         copy->from_pitch};
    struct place to = {copy->to_kind == DEVICE,
                       copy->to_kind == DEVICE ? copy->to_device
                                               : (CUdeviceptr)(uintptr_t)copy->to_host,
                       copy->to_pitch};
    from.pointer += copy->from_y * copy->from_pitch + copy->from_x;
    to.pointer += copy->to_y * copy->to_pitch + copy->to_x;
    struct operation operation = {.kind = COPY, .from = from, .to = to};
    operation.width = copy->width;
    operation.height = copy->height;
    return enqueue_copy(stream, "cuMemcpy2DAsync_v2", operation);
}
