/* The part of NVIDIA's management library that torch calls: who uses the card, and its links. */

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = (void *)bus; /* there is only one */
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }

/* What is asked for stays zero: no fabric. */
int nvmlDeviceGetGpuFabricInfoV(void) { return SUCCESS; }
