/* A stand-in for the CUDA driver, for tests only: a libcuda.so.1 with the functions that kvrail calls,
   over host memory. It is no simulation of a GPU's speed or of its hardware's ordering.

   It differs from a driver on purpose where that shows mistakes of its caller:
   - device pointers cannot be touched by the CPU, nor registered with a network card, unless the
     setting `registrable` says so: the mapping behind them has no access rights;
   - asynchronous copies run on a thread of their stream, and read and write at that time only;
   - asynchronous copies to or from host memory that is not registered are refused;
   - the default stream does not exist.

   A file named `control` beside the library rules it, read at each call. Its lines:
     NAME fail RESULT [AFTER]    calls of this function answer RESULT, after AFTER that did not
     NAME late MILLISECONDS      calls take that long; asynchronous operations begin that late
     NAME hold 1                 asynchronous operations do not begin while this line is there
     NAME lose RESULT [AFTER]    running this asynchronous operation ends the context with RESULT
     set KEY VALUE               see standin_setting
   A file named `log` beside the library, where there is one, gets a line for each call, and for each
   asynchronous operation when it has run: `PID call NAME` and `PID ran NAME`, in their order.

   NAME may be `*`. What the file says holds from the next call on, in all processes that loaded this
   copy of the library. What an asynchronous operation does is what the file said when it was asked for;
   only `hold` is read again until it is gone. A test that looks at what has not run yet holds it: a
   time, however long, ends before a test that stands still looks. A held operation runs on after
   HOLD_MAX_S, so that a test that failed comes to its end.

   To have no function of a name, compile with -DcuName=absent_cuName. */
#define _GNU_SOURCE
#include "cuda_standin.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { NAMES_MAX = 96, DEVICES_MAX = 8, STACK_MAX = 16 };

/* The longest that an operation is held, and how often its line is looked for. */
enum { HOLD_MAX_S = 120, HOLD_POLL_US = 500 };

static struct counted {
    char name[64];
    unsigned long calls;
} counts[NAMES_MAX];
static pthread_mutex_t counts_lock = PTHREAD_MUTEX_INITIALIZER;
static int lost;
static pid_t initialised_by;
static struct context contexts[DEVICES_MAX];
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext stack[STACK_MAX];
static __thread int depth;

void standin_pause(long milliseconds) {
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0) {}
}

/* The path of a file beside the library. */
static void beside(const char *name, char path[4096]) {
    Dl_info self;
    path[0] = 0;
    if (dladdr((void *)standin_call, &self) && self.dli_fname) {
        const char *slash = strrchr(self.dli_fname, '/');
        int directory = slash ? (int)(slash - self.dli_fname) : 0;
        snprintf(path, 4096, "%.*s%s%s", directory, self.dli_fname, slash ? "/" : "", name);
    }
}

static FILE *control(void) {
    char path[4096];
    beside("control", path);
    return fopen(path, "re");
}

void standin_log(const char *what, const char *name) {
    char path[4096];
    beside("log", path);
    int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0) return;
    char line[160];
    int len = snprintf(line, sizeof line, "%d %s %s\n", getpid(), what, name);
    /* In one piece, and nobody is told where it cannot be written: a test misses its line then. */
    if (write(file, line, (size_t)len) != len) {}
    close(file);
}

/* The value of the last line `NAME verb VALUE` that holds for the call of this number. */
static long ruled(const char *name, const char *verb, unsigned long call, long otherwise) {
    FILE *file = control();
    if (!file) return otherwise;
    char line[256], who[128], what[32];
    long found = otherwise;
    while (fgets(line, sizeof line, file)) {
        long value = 0, after = 0;
        int fields = sscanf(line, "%127s %31s %ld %ld", who, what, &value, &after);
        int named = strcmp(who, name) == 0 || strcmp(who, "*") == 0;
        if (fields >= 3 && named && strcmp(what, verb) == 0 && call > (unsigned long)after)
            found = value;
    }
    fclose(file);
    return found;
}

/* `devices` (1), `memory_bytes` of each (1 GiB), `version` (12080), `vmm` (1), `rdma` (1): attributes;
   `registrable` (0): whether a network card can register device pointers; `dmabuf` (1) and
   `dmabuf_pcie` (1): whether memory is exported, and with the flag of a PCIe mapping; `ordering` (0,
   100 or 200) and `flush_options` (1): of writes by network cards; `corrupt` (0): whether
   asynchronous copies are wrong in the first byte of each row. */
long standin_setting(const char *key, long otherwise) {
    FILE *file = control();
    if (!file) return otherwise;
    char line[256], name[128];
    long found = otherwise, value;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "set %127s %ld", name, &value) == 2 && strcmp(name, key) == 0)
            found = value;
    fclose(file);
    return found;
}

static struct counted *counted(const char *name) {
    for (int at = 0; at < NAMES_MAX; at++) {
        if (!counts[at].name[0]) snprintf(counts[at].name, sizeof counts[at].name, "%s", name);
        if (strcmp(counts[at].name, name) == 0) return &counts[at];
    }
    abort();
}

/* How often a function was called in this process. Not of the driver: tests ask. */
API unsigned long standin_calls(const char *name) {
    pthread_mutex_lock(&counts_lock);
    unsigned long calls = counted(name)->calls;
    pthread_mutex_unlock(&counts_lock);
    return calls;
}

CUresult standin_call(const char *name, int in_context) {
    pthread_mutex_lock(&counts_lock);
    unsigned long call = ++counted(name)->calls;
    pthread_mutex_unlock(&counts_lock);
    standin_log("call", name);
    /* Names of asynchronous operations end so or so; theirs is the operation that is late. */
    if (!strstr(name, "Async")) {
        long late = ruled(name, "late", call, 0);
        if (late) standin_pause(late);
    }
    long fail = ruled(name, "fail", call, 0);
    if (fail) return (CUresult)fail;
    if (strcmp(name, "cuInit") != 0 && strcmp(name, "cuDriverGetVersion") != 0) {
        /* A driver does not survive fork. */
        if (initialised_by != getpid()) return NOT_INITIALIZED;
        /* What keeps a thread's books works on in a lost context. */
        if (lost && strcmp(name, "cuCtxPopCurrent_v2") != 0) return lost;
    }
    return in_context && depth == 0 ? INVALID_CONTEXT : SUCCESS;
}

static unsigned long calls_so_far(const char *name) {
    pthread_mutex_lock(&counts_lock);
    unsigned long calls = counted(name)->calls;
    pthread_mutex_unlock(&counts_lock);
    return calls;
}

long standin_late(const char *name) { return ruled(name, "late", calls_so_far(name), 0); }

void standin_hold(const char *name) {
    long polls = HOLD_MAX_S * (1000000L / HOLD_POLL_US);
    while (polls-- && !lost && ruled(name, "hold", calls_so_far(name), 0)) usleep(HOLD_POLL_US);
}

int standin_loses(const char *name) { return (int)ruled(name, "lose", calls_so_far(name), 0); }

void standin_lose(int result) { lost = result; }

int standin_lost(void) { return lost; }

CUcontext standin_current(void) { return depth ? stack[depth - 1] : NULL; }

API CUresult cuInit(unsigned flags) {
    CALL(cuInit);
    if (flags) return INVALID_VALUE;
    if (standin_setting("devices", 1) == 0) return NO_DEVICE;
    if (!initialised_by) initialised_by = getpid();
    return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuDriverGetVersion(int *version) {
    CALL(cuDriverGetVersion);
    *version = (int)standin_setting("version", 12080);
    return SUCCESS;
}

API CUresult cuGetErrorName(CUresult result, const char **name) {
    static const struct {
        CUresult result;
        const char *name;
    } names[] = {
        {SUCCESS, "CUDA_SUCCESS"},
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {CANNOT_MAP, "CUDA_ERROR_MAP_FAILED"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (names[at].result == result) {
            *name = names[at].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

static int is_device(CUdevice device) {
    return device >= 0 && device < standin_setting("devices", 1) && device < DEVICES_MAX;
}

API CUresult cuDeviceGetCount(int *count) {
    CALL(cuDeviceGetCount);
    *count = (int)standin_setting("devices", 1);
    return SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(cuDeviceGet);
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice device) {
    CALL(cuDeviceGetName);
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(name, (size_t)len, "kvrail stand-in %d", device);
    return SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device) {
    CALL(cuDeviceGetUuid_v2);
    if (!is_device(device)) return INVALID_DEVICE;
    memset(uuid, 0x5d, 16);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device) {
    CALL(cuDeviceGetPCIBusId);
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(id, (size_t)len, "0000:%02x:00.0", 0x40 + device);
    return SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CALL(cuDeviceTotalMem_v2);
    if (!is_device(device)) return INVALID_DEVICE;
    *bytes = (size_t)standin_setting("memory_bytes", 1L << 30);
    return SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    CALL(cuDeviceGetAttribute);
    if (!is_device(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 75: *value = 9; break;                                      /* capability, major */
    case 76: *value = 0; break;                                      /* minor */
    case 18: *value = 0; break;                                      /* integrated */
    case 41: *value = 1; break;                                      /* unified addressing */
    case 102: *value = (int)standin_setting("vmm", 1); break;        /* memory management */
    case 103: *value = (int)standin_setting("vmm", 1); break;        /* export as descriptors */
    case 110: *value = (int)standin_setting("rdma", 1); break;       /* GPUDirect with that */
    case 116: *value = (int)standin_setting("rdma", 1); break;       /* GPUDirect */
    case 117: *value = (int)standin_setting("flush_options", 1); break;
    case 118: *value = (int)standin_setting("ordering", 0); break;
    case 124: *value = (int)standin_setting("dmabuf", 1); break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL(cuDevicePrimaryCtxRetain);
    if (!is_device(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&contexts_lock);
    contexts[device].device = device;
    contexts[device].references++;
    pthread_mutex_unlock(&contexts_lock);
    *context = &contexts[device];
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL(cuDevicePrimaryCtxRelease_v2);
    if (!is_device(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&contexts_lock);
    int held = contexts[device].references;
    if (held) contexts[device].references--;
    pthread_mutex_unlock(&contexts_lock);
    return held ? SUCCESS : INVALID_CONTEXT;
}

/* How often a device's primary context is retained. Not of the driver: tests ask. */
API int standin_retained(int device) { return contexts[device].references; }

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CALL(cuCtxPushCurrent_v2);
    if (!context || !context->references || depth == STACK_MAX) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CALL_IN_CONTEXT(cuCtxPopCurrent_v2);
    if (context) *context = stack[depth - 1];
    depth--;
    return SUCCESS;
}
