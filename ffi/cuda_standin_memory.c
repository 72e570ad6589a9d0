/* The stand-in driver's memory: allocations, mappings, exports. */
#define _GNU_SOURCE
#include "cuda_standin.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/udmabuf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, DEVICES_MAX = 8 };

/* Memory as a device has it, behind as many pointers as there are. */
struct physical {
    int file, device, references, imported;
    size_t size;
    char *bytes;
};

enum kind { ALLOCATED, RESERVED, MAPPED, IMPORTED };

/* A range of device pointers. */
struct range {
    struct range *next;
    enum kind kind;
    CUdeviceptr start;
    size_t size, offset;
    struct physical *physical;
    int access;
};

struct location {
    int type, id;
};

struct properties {
    int type, handle_types;
    struct location location;
    void *windows;
    unsigned char compression, rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct access {
    struct location location;
    int flags;
};

struct ipc_handle {
    char reserved[64];
};

struct ipc {
    char magic[8];
    int pid, file, device;
    size_t size;
};

static const char MAGIC[8] = "standin";

pthread_mutex_t standin_memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static size_t used[DEVICES_MAX];

static size_t pages(size_t size) { return (size + 4095) & ~(size_t)4095; }

static CUresult allocate(struct physical **out, size_t size, int device) {
    size_t total = (size_t)standin_setting("memory_bytes", 1L << 30);
    if (size > total || used[device] > total - size) return OUT_OF_MEMORY;
    int file = memfd_create("device-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return OUT_OF_MEMORY;
    char *bytes = MAP_FAILED;
    if (ftruncate(file, (off_t)pages(size)) == 0 && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
        bytes = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    struct physical *made = calloc(1, sizeof *made);
    if (bytes == MAP_FAILED || !made) {
        close(file);
        free(made);
        return OUT_OF_MEMORY;
    }
    *made = (struct physical){file, device, 1, 0, size, bytes};
    used[device] += size;
    *out = made;
    return SUCCESS;
}

static void forget(struct physical *memory) {
    if (--memory->references) return;
    munmap(memory->bytes, pages(memory->size));
    close(memory->file);
    if (!memory->imported) used[memory->device] -= memory->size;
    free(memory);
}

/* Maps memory where device pointers are: out of the CPU's reach, unless a card shall reach it. */
static CUresult map(CUdeviceptr *at, int fixed, struct physical *memory, size_t offset, size_t size) {
    int reach = standin_setting("registrable", 0) ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *place = mmap(fixed ? (void *)(uintptr_t)*at : NULL, pages(size), reach,
                       MAP_SHARED | (fixed ? MAP_FIXED : 0), memory->file, (off_t)offset);
    if (place == MAP_FAILED) return CANNOT_MAP;
    *at = (CUdeviceptr)(uintptr_t)place;
    return SUCCESS;
}

static void add(enum kind kind, CUdeviceptr start, size_t size, struct physical *memory) {
    struct range *made = calloc(1, sizeof *made);
    if (!made) abort();
    *made = (struct range){ranges, kind, start, size, 0, memory, kind != MAPPED};
    ranges = made;
}

static struct range *find(CUdeviceptr pointer, size_t len, int reserved) {
    for (struct range *one = ranges; one; one = one->next) {
        int inside = pointer >= one->start && len <= one->size &&
                     pointer - one->start <= one->size - len;
        if (inside && (one->kind == RESERVED) == reserved) return one;
    }
    return NULL;
}

static void drop(struct range *range) {
    for (struct range **link = &ranges; *link; link = &(*link)->next)
        if (*link == range) {
            *link = range->next;
            free(range);
            return;
        }
}

char *standin_device_bytes(CUdeviceptr pointer, size_t len) {
    struct range *range = find(pointer, len, 0);
    if (!range || !range->access) return NULL;
    return range->physical->bytes + range->offset + (pointer - range->start);
}

API CUresult cuMemGetInfo_v2(size_t *left, size_t *total) {
    CALL_IN_CONTEXT(cuMemGetInfo_v2);
    LOCKED;
    *total = (size_t)standin_setting("memory_bytes", 1L << 30);
    *left = *total - used[standin_current()->device];
    return SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    CALL_IN_CONTEXT(cuMemAlloc_v2);
    LOCKED;
    struct physical *memory;
    if (!size) return INVALID_VALUE;
    CUresult result = allocate(&memory, size, standin_current()->device);
    if (result) return result;
    result = map(pointer, 0, memory, 0, size);
    if (result)
        forget(memory);
    else
        add(ALLOCATED, *pointer, size, memory);
    return result;
}

static CUresult unmap_all(CUdeviceptr pointer, enum kind kind) {
    struct range *range = find(pointer, 1, 0);
    if (!range || range->kind != kind || range->start != pointer) return INVALID_VALUE;
    munmap((void *)(uintptr_t)pointer, pages(range->size));
    forget(range->physical);
    drop(range);
    return SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    CALL_IN_CONTEXT(cuMemFree_v2);
    LOCKED;
    return unmap_all(pointer, ALLOCATED);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    CALL_IN_CONTEXT(cuMemGetAddressRange_v2);
    LOCKED;
    struct range *range = find(pointer, 1, 0);
    if (!range) return INVALID_VALUE;
    if (base) *base = range->start;
    if (size) *size = range->size;
    return SUCCESS;
}

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer) {
    CALL(cuPointerGetAttribute);
    LOCKED;
    struct range *range = find(pointer, 1, 0);
    if (!range) return INVALID_VALUE;
    switch (attribute) {
    case 2: *(unsigned *)value = 2; return SUCCESS;                      /* device memory */
    case 9: *(int *)value = range->physical->device; return SUCCESS;    /* its device */
    default: return NOT_SUPPORTED;
    }
}

API CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr pointer) {
    CALL(cuPointerSetAttribute);
    LOCKED;
    (void)value;
    if (!find(pointer, 1, 0)) return INVALID_VALUE;
    return attribute == 6 ? SUCCESS : NOT_SUPPORTED; /* synchronous operations stay so */
}

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct properties *properties,
                                           int option) {
    CALL(cuMemGetAllocationGranularity);
    (void)properties, (void)option;
    *bytes = GRANULARITY;
    return SUCCESS;
}

API CUresult cuMemCreate(unsigned long long *handle, size_t size,
                         const struct properties *properties, unsigned long long flags) {
    CALL(cuMemCreate);
    LOCKED;
    int device = properties->location.id;
    if (!standin_setting("vmm", 1)) return NOT_SUPPORTED;
    if (flags || properties->type != 1 || properties->location.type != 1 || !size ||
        size % GRANULARITY || device < 0 || device >= standin_setting("devices", 1))
        return INVALID_VALUE;
    if (properties->rdma_capable && !standin_setting("rdma", 1)) return NOT_SUPPORTED;
    struct physical *memory;
    CUresult result = allocate(&memory, size, device);
    if (result == SUCCESS) *handle = (uintptr_t)memory;
    return result;
}

API CUresult cuMemRelease(unsigned long long handle) {
    CALL(cuMemRelease);
    LOCKED;
    forget((struct physical *)(uintptr_t)handle);
    return SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment,
                                 CUdeviceptr wish, unsigned long long flags) {
    CALL(cuMemAddressReserve);
    LOCKED;
    (void)alignment, (void)wish;
    if (flags || !size || size % GRANULARITY) return INVALID_VALUE;
    void *place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return OUT_OF_MEMORY;
    *pointer = (CUdeviceptr)(uintptr_t)place;
    add(RESERVED, *pointer, size, NULL);
    return SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    CALL(cuMemAddressFree);
    LOCKED;
    struct range *range = find(pointer, size, 1);
    if (!range || range->start != pointer || range->size != size || find(pointer, 1, 0))
        return INVALID_VALUE;
    munmap((void *)(uintptr_t)pointer, size);
    drop(range);
    return SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, unsigned long long handle,
                      unsigned long long flags) {
    CALL(cuMemMap);
    LOCKED;
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    if (flags || offset || size != memory->size || !find(pointer, size, 1) || find(pointer, 1, 0))
        return INVALID_VALUE;
    CUresult result = map(&pointer, 1, memory, offset, size);
    if (result) return result;
    memory->references++;
    add(MAPPED, pointer, size, memory);
    return SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    CALL(cuMemUnmap);
    LOCKED;
    struct range *range = find(pointer, size, 0);
    if (!range || range->kind != MAPPED || range->start != pointer || range->size != size)
        return INVALID_VALUE;
    mmap((void *)(uintptr_t)pointer, size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    forget(range->physical);
    drop(range);
    return SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const struct access *access,
                            size_t count) {
    CALL(cuMemSetAccess);
    LOCKED;
    struct range *range = find(pointer, size, 0);
    if (!range || count != 1 || access->location.type != 1 || access->flags != 3)
        return INVALID_VALUE;
    range->access = 1;
    return SUCCESS;
}

API CUresult cuMemExportToShareableHandle(void *out, unsigned long long handle, int type,
                                          unsigned long long flags) {
    CALL(cuMemExportToShareableHandle);
    if (type != 1 || flags) return INVALID_VALUE;
    int file = fcntl(((struct physical *)(uintptr_t)handle)->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return NOT_SUPPORTED;
    *(int *)out = file;
    return SUCCESS;
}

/* Memory of another allocation, by its file. Under the lock. */
static CUresult import(struct physical **out, int file, size_t size, int device) {
    struct physical *made = calloc(1, sizeof *made);
    char *bytes = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (!made || bytes == MAP_FAILED) {
        free(made);
        close(file);
        return CANNOT_MAP;
    }
    *made = (struct physical){file, device, 1, 1, size, bytes};
    *out = made;
    return SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(unsigned long long *handle, void *descriptor, int type) {
    CALL(cuMemImportFromShareableHandle);
    LOCKED;
    struct stat facts;
    int given = (int)(intptr_t)descriptor;
    /* Another file than such memory is is refused. */
    if (type != 1 || fcntl(given, F_GET_SEALS) < 0 || fstat(given, &facts) != 0) return INVALID_VALUE;
    int file = fcntl(given, F_DUPFD_CLOEXEC, 0);
    struct physical *memory;
    CUresult result = import(&memory, file, (size_t)facts.st_size, 0);
    if (result == SUCCESS) *handle = (uintptr_t)memory;
    return result;
}

API CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr pointer) {
    CALL_IN_CONTEXT(cuIpcGetMemHandle);
    LOCKED;
    struct range *range = find(pointer, 1, 0);
    if (!range || range->kind != ALLOCATED) return INVALID_VALUE;
    struct ipc ipc = {.pid = getpid(),
                      .file = range->physical->file,
                      .device = range->physical->device,
                      .size = range->size};
    memcpy(ipc.magic, MAGIC, sizeof MAGIC);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ipc, sizeof ipc);
    return SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct ipc_handle handle, unsigned flags) {
    CALL_IN_CONTEXT(cuIpcOpenMemHandle_v2);
    LOCKED;
    struct ipc ipc;
    memcpy(&ipc, &handle, sizeof ipc);
    if (memcmp(ipc.magic, MAGIC, sizeof MAGIC) != 0) return INVALID_HANDLE;
    if (flags != 1) return INVALID_VALUE;
    /* A process cannot open its own, nor in a context of a device that does not reach the memory. */
    if (ipc.pid == getpid()) return INVALID_CONTEXT;
    if (ipc.device != standin_current()->device) return INVALID_DEVICE;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return CANNOT_MAP;
    struct physical *memory;
    CUresult result = import(&memory, file, ipc.size, ipc.device);
    if (result) return result;
    result = map(pointer, 0, memory, 0, ipc.size);
    if (result)
        forget(memory);
    else
        add(IMPORTED, *pointer, ipc.size, memory);
    return result;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    CALL_IN_CONTEXT(cuIpcCloseMemHandle);
    LOCKED;
    return unmap_all(pointer, IMPORTED);
}

API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t size, int type,
                                           unsigned long long flags) {
    CALL_IN_CONTEXT(cuMemGetHandleForAddressRange);
    LOCKED;
    struct range *range = find(pointer, size, 0);
    if (!range || type != 1 || flags > 1 || pointer % 4096 || size % 4096) return INVALID_VALUE;
    if (!standin_setting("dmabuf", 1)) return NOT_SUPPORTED;
    if (flags == 1 && !standin_setting("dmabuf_pcie", 1)) return NOT_SUPPORTED;
    int maker = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
    if (maker < 0) return NOT_SUPPORTED;
    struct udmabuf_create wish = {.memfd = (unsigned)range->physical->file,
                                  .flags = UDMABUF_FLAGS_CLOEXEC,
                                  .offset = range->offset + (pointer - range->start),
                                  .size = size};
    int file = ioctl(maker, UDMABUF_CREATE, &wish);
    close(maker);
    if (file < 0) return NOT_SUPPORTED;
    *(int *)handle = file;
    return SUCCESS;
}

API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    CALL_IN_CONTEXT(cuFlushGPUDirectRDMAWrites);
    if (target != 0 || (scope != 100 && scope != 200)) return INVALID_VALUE;
    return standin_setting("flush_options", 1) & 1 ? SUCCESS : NOT_SUPPORTED;
}
