/* The part of CUDA's driver that torch calls itself: segments that grow, and the context. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>

#define GRANULARITY ((size_t)2 << 20)

CUresult stand_in_driver_lacks_it(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuInit(unsigned int flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : device_message();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    cudaDriverGetVersion(version);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    cudaGetDeviceCount(count);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* Numbers of attributes are those of the runtime. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) {
    *flags = 0;
    *is_active = device == 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    static int only_one;
    (void)device;
    *context = (CUcontext)&only_one;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }

CUresult cuCtxSetCurrent(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(
    size_t *size, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags flags
) {
    (void)properties, (void)flags;
    *size = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(
    CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
    unsigned long long flags
) {
    (void)alignment, (void)wanted, (void)flags;
    bool is_done = device_reserve(size, (void **)address);
    return is_done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    return device_release((void *)address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A handle is the size of the memory that it stands for; the bytes come with the mapping. */
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
    unsigned long long flags
) {
    (void)properties, (void)flags;
    if (!device_take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = size;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    device_give(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long flags
) {
    (void)offset, (void)handle, (void)flags;
    return device_map((void *)address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(
    CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count
) {
    (void)address, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    return device_unmap((void *)address, size) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}
