// PK_HOST_DEVICE: for the small functions that host and device must agree on.
#pragma once

#ifdef __CUDACC__
#define PK_HOST_DEVICE __host__ __device__
#else
#define PK_HOST_DEVICE
#endif
