/* Host memory that the stand-in driver knows, and the copies that wait for their end. */
#define _GNU_SOURCE
#include "cuda_standin.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The caller's memory, or the driver's own. */
struct host {
    struct host *next;
    char *start;
    size_t size;
    int own;
};

static struct host *hosts;

static size_t pages(size_t size) { return (size + 4095) & ~(size_t)4095; }

int standin_host_registered(const void *pointer, size_t len) {
    for (struct host *one = hosts; one; one = one->next) {
        size_t offset = (size_t)((const char *)pointer - one->start);
        if ((const char *)pointer >= one->start && len <= one->size && offset <= one->size - len)
            return 1;
    }
    return 0;
}

API CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    CALL_IN_CONTEXT(cuMemHostRegister_v2);
    LOCKED;
    if (!pointer || !size || flags > 1) return INVALID_VALUE;
    for (struct host *one = hosts; one; one = one->next)
        if ((char *)pointer < one->start + one->size && one->start < (char *)pointer + size)
            return ALREADY_REGISTERED;
    struct host *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    *made = (struct host){hosts, pointer, size, 0};
    hosts = made;
    return SUCCESS;
}

static struct host *forget_host(const void *pointer, int own) {
    for (struct host **link = &hosts; *link; link = &(*link)->next)
        if ((*link)->start == (const char *)pointer && (*link)->own == own) {
            struct host *gone = *link;
            *link = gone->next;
            return gone;
        }
    return NULL;
}

API CUresult cuMemHostUnregister(void *pointer) {
    CALL_IN_CONTEXT(cuMemHostUnregister);
    LOCKED;
    struct host *gone = forget_host(pointer, 0);
    free(gone);
    return gone ? SUCCESS : NOT_REGISTERED;
}

API CUresult cuMemAllocHost_v2(void **pointer, size_t size) {
    CALL_IN_CONTEXT(cuMemAllocHost_v2);
    LOCKED;
    if (!size) return INVALID_VALUE;
    void *start = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct host *made = calloc(1, sizeof *made);
    if (start == MAP_FAILED || !made) {
        free(made);
        return OUT_OF_MEMORY;
    }
    *made = (struct host){hosts, start, size, 1};
    hosts = made;
    *pointer = start;
    return SUCCESS;
}

API CUresult cuMemFreeHost(void *pointer) {
    CALL_IN_CONTEXT(cuMemFreeHost);
    LOCKED;
    struct host *gone = forget_host(pointer, 1);
    if (!gone) return INVALID_VALUE;
    munmap(gone->start, pages(gone->size));
    free(gone);
    return SUCCESS;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t len) {
    CALL_IN_CONTEXT(cuMemcpyHtoD_v2);
    LOCKED;
    char *bytes = standin_device_bytes(to, len);
    if (!bytes) return INVALID_VALUE;
    memcpy(bytes, from, len);
    return SUCCESS;
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t len) {
    CALL_IN_CONTEXT(cuMemcpyDtoH_v2);
    LOCKED;
    const char *bytes = standin_device_bytes(from, len);
    if (!bytes) return INVALID_VALUE;
    memcpy(to, bytes, len);
    return SUCCESS;
}
