// The NCCL library of this process, any version from 2.27 on, found at run time.
#pragma once

#include <string>
#include <vector>

#include "gpu/nccl_api.h"

namespace unicron::gpu {

// Where to look when the process has not loaded NCCL itself; later calls change nothing. Torch's own copy, once torch
// is imported, is found without.
void add_nccl_path(const std::string& path);

const NcclApi* find_nccl();  // null where there is none; why_no_nccl() says why
std::string why_no_nccl();
const NcclApi& nccl();  // throws Error(kNoDevice)

int nccl_version();                       // 22809 for 2.28.9; 0 without
std::vector<std::string> nccl_missing();  // names of optional functions that this version lacks

// Throws Error(kDevice) unless `result` is a success; "in progress" is one.
void check_nccl(NcclResult result, const std::string& what);
std::string nccl_error_text(NcclResult result);

}  // namespace unicron::gpu
