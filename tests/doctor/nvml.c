/* A driver library that answers for the machine of MACHINE: "two" RTX PRO 6000 behind one
   switch, "eight" on two NUMA nodes, the last at x4, "pairs" for four of which each two are
   linked, "nvlink" for two linked H200, "old" for a driver that knows few functions, "mig",
   "lost" for a card that fell off the bus. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define NOT_SUPPORTED 3
#define GPU_IS_LOST 15
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { u32 gpu, memory; } rates_t;
typedef struct {
  char legacy[16];
  u32 domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} pci_t;
typedef struct { u32 version; unsigned char uuid[16]; u32 status, clique, state, health; } fabric_t;

static int is(const char *name) { return strcmp(getenv("MACHINE"), name) == 0; }
static u32 index_of(void *handle) { return (u32)(size_t)handle - 1; }

int nvmlInitWithFlags(u32 flags) { return is("broken") ? 999 : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Failed"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { return snprintf(text, size, "580.95.05") < 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return OK; }
int nvmlDeviceGetCount_v2(u32 *count) {
  *count = is("eight") ? 8 : is("pairs") ? 4 : 2;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(u32 i, void **handle) { *handle = (void *)(size_t)(i + 1); return OK; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  u32 i;
  if (sscanf(uuid, "GPU-%x", &i) != 1) return NOT_SUPPORTED;
  *handle = (void *)(size_t)(i + 1);
  return OK;
}
int nvmlDeviceGetName(void *h, char *text, u32 size) {
  return snprintf(text, size, is("nvlink") ? "NVIDIA H200" : "NVIDIA RTX PRO 6000") < 0;
}
int nvmlDeviceGetUUID(void *h, char *text, u32 size) {
  return snprintf(text, size, "GPU-%08x", index_of(h)) < 0;
}
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  if (is("lost") && index_of(h) == 0) return GPU_IS_LOST;
  m->total = 96ULL << 30; m->used = (index_of(h) + 1ULL) << 30; m->free = m->total - m->used;
  return OK;
}
int nvmlDeviceGetBAR1MemoryInfo(void *h, memory_t *m) {
  if (is("old")) return NOT_SUPPORTED;
  m->total = 128ULL << 30; m->used = 0; m->free = m->total;
  return OK;
}
int nvmlDeviceGetUtilizationRates(void *h, rates_t *r) {
  r->gpu = 40 + index_of(h); r->memory = 1;
  return is("old") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetComputeMode(void *h, u32 *mode) { *mode = is("mig") ? 3 : 0; return OK; }
int nvmlDeviceGetMigMode(void *h, u32 *now, u32 *later) {
  *now = *later = is("mig");
  return is("old") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) {
  memset(p, 0, sizeof *p);
  snprintf(p->busId, sizeof p->busId, "00000000:%02X:00.0", 0xC1 + index_of(h));
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  *major = is("nvlink") ? 9 : 12; *minor = 0;
  return OK;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *h, u32 *v) {
  *v = !is("eight") ? 8 : index_of(h) == 7 ? 4 : 16;
  return OK;
}
int nvmlDeviceGetMaxPcieLinkWidth(void *h, u32 *v) { *v = 16; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, u32 *v) { *v = 1; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, u32 *v) { *v = 5; return OK; }
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, u32 *level) {
  u32 size = is("eight") ? 4 : is("pairs") ? 2 : 0;  // cards of a NUMA node
  *level = size && index_of(a) / size == index_of(b) / size ? 40 : size || is("nvlink") ? 50 : 10;
  return is("old") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, u32 caps, u32 *status) {
  if (is("old")) return NOT_SUPPORTED;
  int linked = is("nvlink") || (is("pairs") && index_of(a) / 2 == index_of(b) / 2);
  *status = caps == 2 ? (linked ? 0 : 5) : (is("mig") ? 4 : 0);
  return OK;
}
#ifndef OLD
int nvmlDeviceGetGpuFabricInfoV(void *h, fabric_t *f) {
  f->state = is("nvlink") ? 3 : 0;
  return OK;
}
#endif
