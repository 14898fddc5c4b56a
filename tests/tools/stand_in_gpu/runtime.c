/* The part of CUDA's runtime that torch calls, on the device of device.h.
 *
 * What is missing here is made by build.py: functions that answer "not supported" with their name.
 */
#define _GNU_SOURCE
#include "device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB ((size_t)1 << 10)
#define GIB ((size_t)1 << 30)

static __thread cudaError_t last_error;
static int capability_major = 9, capability_minor = 0;

/* STAND_IN_GPU_GIB and STAND_IN_GPU_CAPABILITY choose the card. */
__attribute__((constructor)) static void read_environment(void) {
    const char *gib = getenv("STAND_IN_GPU_GIB");
    const char *capability = getenv("STAND_IN_GPU_CAPABILITY");
    if (gib != NULL) device_set_limit((size_t)(atof(gib) * GIB));
    if (capability != NULL) sscanf(capability, "%d.%d", &capability_major, &capability_minor);
}

static cudaError_t result(bool is_done, cudaError_t otherwise) {
    if (is_done) return cudaSuccess;
    last_error = device_is_lost() ? cudaErrorIllegalAddress : otherwise;
    return last_error;
}

/* What launched something wrong, or met a device that is lost. */
static cudaError_t launched(bool is_done) { return result(is_done, cudaErrorLaunchFailure); }

cudaError_t stand_in_unsupported(const char *name) {
    refuse("the stand-in has no %s", name);
    return result(false, cudaErrorNotSupported);
}

static Stream *stream_of(cudaStream_t handle) {
    bool is_default = (uintptr_t)handle <= (uintptr_t)cudaStreamPerThread;
    return is_default ? stream_default() : (Stream *)handle;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return device_is_lost() ? cudaErrorIllegalAddress : error;
}

cudaError_t cudaPeekAtLastError(void) {
    return device_is_lost() ? cudaErrorIllegalAddress : last_error;
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    default: return device_message();
    }
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible == NULL || visible[0] == '0' || strncmp(visible, "GPU-", 4) == 0;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device != 0) return cudaErrorInvalidDevice;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "Stand-in GPU");
    memcpy(properties->uuid.bytes, "stand-in for GPU", 16);
    properties->totalGlobalMem = device_limit();
    properties->major = capability_major;
    properties->minor = capability_minor;
    properties->sharedMemPerBlock = 48 * KIB;
    properties->sharedMemPerBlockOptin = 227 * KIB;
    properties->sharedMemPerMultiprocessor = 228 * KIB;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    for (int axis = 0; axis < 3; axis++) {
        properties->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
        properties->maxGridSize[axis] = axis == 0 ? 0x7fffffff : 65535;
    }
    properties->multiProcessorCount = 132;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->textureAlignment = 512;
    properties->concurrentKernels = properties->asyncEngineCount = 1;
    properties->unifiedAddressing = properties->managedMemory = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
    }
    return error;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:00:00.0");
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) {
    *can = device == other;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return launched(device_synchronize()); }

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned int version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status
) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (*function == NULL) *function = dlsym(RTLD_DEFAULT, "stand_in_driver_lacks_it");
    if (status != NULL) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **address, size_t size) {
    return result(device_allocate(size, address), cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address) {
    return address == NULL ? cudaSuccess : launched(device_free(address));
}

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned int flags) {
    (void)flags;
    return result(device_pin(size, address), cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *address) { return launched(device_unpin(address)); }

cudaError_t cudaHostRegister(void *address, size_t size, unsigned int flags) {
    (void)flags;
    return result(device_register(address, size), cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *address) {
    return result(device_unregister(address), cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = device_limit() - device_used();
    *total = device_limit();
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    Range range;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)address;
    if (!device_range_at(address, &range)) return cudaSuccess;
    attributes->devicePointer = (void *)address;
    attributes->type = range.place == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    (void)kind; /* the addresses tell */
    return launched(stream_copy(stream_of(stream), target, source, size));
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(target, source, size, kind, NULL);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

cudaError_t cudaMemcpyPeerAsync(
    void *target, int to, const void *source, int from, size_t size, cudaStream_t stream
) {
    (void)to, (void)from;
    return cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    return launched(stream_fill(stream_of(stream), target, value, size));
}

cudaError_t cudaMemset(void *target, int value, size_t size) {
    return cudaMemsetAsync(target, value, size, NULL);
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    (void)flags, (void)priority;
    *stream = (cudaStream_t)stream_create();
    return *stream != NULL ? cudaSuccess : stand_in_unsupported("more streams");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    stream_destroy(stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    (void)stream;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream_query(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return launched(stream_synchronize(stream_of(stream)));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    (void)flags;
    event_wait((Event *)event, stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *number,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
    size_t *count
) {
    (void)number, (void)graph, (void)nodes, (void)edges, (void)count;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    stream_call(stream_of(stream), function, data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    *event = (cudaEvent_t)event_create();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    event_destroy((Event *)event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event_record((Event *)event, stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return event_query((Event *)event) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return launched(event_synchronize((Event *)event));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    double seconds = 0;
    bool are_reached = event_seconds((Event *)begin, (Event *)end, &seconds);
    *milliseconds = 1e3 * seconds;
    return are_reached ? cudaSuccess : cudaErrorNotReady;
}

/* ---- kernels ---- */

/* A kernel of mirror.py begins, see stream_kernel. An earlier error that nobody asked for comes
 * up now, as it does when torch checks its launches. */
cudaError_t stand_in_kernel(
    cudaStream_t stream, const char *name, int count, void *const *starts, const size_t *sizes,
    const bool *writes
) {
    cudaError_t earlier = cudaGetLastError();
    if (earlier != cudaSuccess) return earlier;
    bool is_ready = stream_kernel(stream_of(stream), name, count, starts, sizes, writes);
    cudaError_t error = launched(is_ready);
    last_error = cudaSuccess;
    return error;
}

typedef struct {
    const void *function;
    char *name;
} Kernel;

static Kernel *kernels;
static size_t kernel_count, kernel_capacity;

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

char __cudaInitModule(void **handle) { return handle != NULL; }

void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name) {
    (void)handle, (void)device;
    lock();
    if (kernel_count == kernel_capacity) {
        kernel_capacity = 2 * kernel_capacity + 1024;
        kernels = realloc(kernels, kernel_capacity * sizeof *kernels);
    }
    kernels[kernel_count++] = (Kernel){function, (char *)name};
    unlock();
}

void __cudaRegisterVar(void **handle) { (void)handle; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

static cudaError_t without_mirror(const void *function) {
    const char *name = "of an unknown name";
    for (size_t index = 0; index < kernel_count; index++)
        if (kernels[index].function == function) name = kernels[index].name;
    refuse("the kernel %s has no mirror", name);
    return result(false, cudaErrorNotSupported);
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **values, size_t shared, cudaStream_t stream
) {
    (void)grid, (void)block, (void)values, (void)shared, (void)stream;
    return without_mirror(kernel);
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **values, size_t shared, cudaStream_t stream
) {
    return __cudaLaunchKernel((cudaKernel_t)function, grid, block, values, shared, stream);
}

cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **values
) {
    (void)config, (void)values;
    return without_mirror(function);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 10 * capability_major + capability_minor;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *function, int block, size_t shared, unsigned int flags
) {
    (void)function, (void)block, (void)shared, (void)flags;
    *count = 1;
    return cudaSuccess;
}
