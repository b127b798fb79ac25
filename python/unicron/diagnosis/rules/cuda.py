"""What CUDA, its libraries and torch's CUDA layer say in a process.

An error is known by its text, its name (cudaError..., CUDA_ERROR_...) or its number. Two numberings exist: before
CUDA 10.1 the runtime's own (59 = assert), since then that of the driver (710 = assert). torch wrote the first as
"cuda runtime error (59)". Errors surface late: the line of the traceback is meaningless, the error is not.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

DOCS = "CUDA runtime API, enum cudaError"
NUMBERED = r"(?i:cuda (?:runtime )?error|error code|cuda failure|cudaerror|cuda errno)[ :=(]{1,3}"


def numbered(numbers: str) -> str:
    """Pattern of an error said by number; numbers as alternatives."""
    return rf"{NUMBERED}(?:{numbers})\b"


RULES = (
    Rule(
        "cuda.impossible-allocation", r"Tried to allocate (?:more than )?(?:\d+(?:\.\d+)? ?)(?:EB|EiB|PB|PiB)\b",
        Severity.SEV2, Scope.PROCESS, Category.NCCL_TIMEOUT, Strength.ECHO,
        "no model asks for that much: a size that came out of a broken collective",
        "c10/cuda/CUDACachingAllocator.cpp",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.2 EiB. GPU 0 has ...",
        is_final=True,
    ),
    Rule(
        "cuda.ecc", r"(?i)uncorrectable ECC|double.bit ECC|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE|"
        + numbered("214|39"),
        Severity.SEV1, Scope.GPU, Category.ECC, Strength.HARDWARE,
        "memory of this GPU is damaged: isolate it until it was reset and checked", DOCS,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    Rule(
        "cuda.contained", r"cudaErrorContained|Invalid access of peer GPU memory over nvlink|" + numbered("721"),
        Severity.SEV2, Scope.PROCESS, Category.NVLINK, Strength.CAUSE,
        "a peer's memory went away or a contained memory error: this process only", DOCS,
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    ),
    Rule(
        "cuda.nvlink", r"(?i)uncorrectable NVLink error|cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE|"
        + numbered("220"),
        Severity.SEV1, Scope.LINK, Category.NVLINK, Strength.HARDWARE,
        "NVLink could not deliver: the link or one of its ends is bad", DOCS,
        "CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    Rule(
        "cuda.gpu-lost", r"(?i)\bGPU is lost\b|unable to determine the device handle|GPU requires reset|"
        r"NVML_ERROR_GPU_IS_LOST|NVML_ERROR_RESET_REQUIRED|No devices were found|\[GPU requires reset\]",
        Severity.SEV1, Scope.GPU, Category.GPU_DRIVER, Strength.HARDWARE,
        "the driver lost this GPU", "nvidia-smi, NVML return codes",
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
    ),
    Rule(
        "cuda.fabric", r"(?i)system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY|"
        r"fabric ?manager (?:is )?not running|" + numbered("802"),
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.HARDWARE,
        "the fabric manager of this NVSwitch node does not run, or has another version than the driver", DOCS,
        "Error 802: system not yet initialized",
    ),
    Rule(
        "cuda.driver-mismatch", r"(?i)driver/library version mismatch|cudaErrorSystemDriverMismatch|"
        r"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|unsupported display driver / cuda driver combination|"
        r"NVRM: API mismatch|couldn't communicate with the NVIDIA driver|failed to initialize NVML|"
        r"nvmlInit.{0,20}failed|"
        + numbered("803|804"),
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.HARDWARE,
        "driver and user-space libraries of this node do not fit each other, or the driver does not answer", DOCS,
        "Failed to initialize NVML: Driver/library version mismatch",
    ),
    Rule(
        "cuda.driver-too-old", r"(?i)driver version is insufficient|NVIDIA driver on your system is too old|"
        r"cudaErrorInsufficientDriver|found no NVIDIA driver on your system|" + numbered("35"),
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.CAUSE,
        "this node's driver is missing or older than the CUDA of the image", DOCS,
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    Rule(
        "cuda.dma-mapping", r"(?i)mapping of buffer object failed|unmapping of buffer object failed|"
        r"cudaErrorMapBufferObjectFailed|CUDA_ERROR_MAP_FAILED|invalid DMA mapping|DMAR:.{0,80}fault|"
        + numbered("205|206"),
        Severity.SEV1, Scope.NODE, Category.INVALID_DMA, Strength.HARDWARE,
        "the device's view of host memory is broken", DOCS,
        "CUDA error: mapping of buffer object failed",
    ),
    Rule(
        "cuda.busy", r"(?i)devices? (?:are|is) busy or unavailable|cudaErrorDevicesUnavailable|"
        r"CUDA_ERROR_DEVICE_UNAVAILABLE|" + numbered("46"),
        Severity.SEV2, Scope.PROCESS, Category.OTHER_CUDA, Strength.CAUSE,
        "another process holds the GPU (exclusive mode, or one that has not ended yet)", DOCS,
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    ),
    Rule(
        "cuda.assert", r"(?i)device-side assert|cudaErrorAssert\b|CUDA_ERROR_ASSERT|"
        r"thread: \[[\d, ]*\] Assertion|" + numbered("710|59"),
        Severity.FATAL, Scope.JOB, Category.OTHER_CUDA, Strength.CAUSE,
        "a kernel's assertion: an index or a label out of range, in data or code", DOCS,
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    Rule(
        "cuda.out-of-memory", r"(?i)CUDA out of memory|CUDA error: out of memory|cuda failure.{0,5}out of memory|"
        r"OutOfMemoryError|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUDA out.of.memory|"
        r"HIP out of memory|DefaultCPUAllocator: (?:not enough|can't allocate) memory|" + numbered("2"),
        Severity.FATAL, Scope.JOB, Category.OTHER_CUDA, Strength.CAUSE,
        "the model does not fit: restarting repeats it", "c10/cuda/CUDACachingAllocator.cpp",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    Rule(
        "cuda.wrong-build", r"(?i)no kernel image is available|kernel image is invalid|PTX codegen error|"
        r"out of resource: shared memory|cudaErrorNoKernelImageForDevice|"
        "invalid device function|"
        r"cudaErrorInvalidDeviceFunction|unsupported toolchain|the provided PTX was compiled|named symbol not found|"
        r"CUDA_ERROR_NO_BINARY_FOR_GPU|CUDA_ERROR_INVALID_PTX|not compiled with CUDA enabled|invalid device symbol|"
        r"is not compatible with the current PyTorch installation|" + numbered("209|222|218|98|48"),
        Severity.FATAL, Scope.JOB, Category.OTHER_CUDA, Strength.CAUSE,
        "this program was not built for this GPU", DOCS,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    Rule(
        "cuda.wrong-use", r"(?i)invalid device ordinal|stream is capturing|graph capture encountered|"
        "cudaErrorInvalidDevice\b|invalid configuration argument|"
        r"cudaErrorInvalidConfiguration|CUDA error: invalid argument|cudaErrorInvalidValue|"
        r"too many resources requested|"
        r"cudaErrorLaunchOutOfResources|re-initialize CUDA in forked subprocess|peer access is not supported|"
        r"cudaErrorPeerAccessUnsupported|CUBLAS_STATUS_INVALID_VALUE|CUBLAS_STATUS_NOT_SUPPORTED|"
        r"CUBLAS_STATUS_ARCH_MISMATCH|CUDNN_STATUS_BAD_PARAM|CUDNN_STATUS_NOT_SUPPORTED|invalid texture|"
        + numbered("1|9|101|217|701"),
        Severity.FATAL, Scope.JOB, Category.OTHER_CUDA, Strength.CAUSE,
        "a call that cannot succeed: code or configuration", DOCS,
        "RuntimeError: CUDA error: invalid device ordinal",
    ),
    Rule(
        "cuda.no-device", r"(?i)no CUDA-capable device|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE|"
        "No CUDA GPUs are available|"
        + numbered("38|100"),
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.DEATH,
        "no GPU is visible here: lost, or CUDA_VISIBLE_DEVICES is wrong (then on all nodes)", DOCS,
        "RuntimeError: No CUDA GPUs are available",
    ),
    Rule(
        "cuda.illegal-access", r"(?i)illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|"
        r"Memory access fault by GPU node|HSA_STATUS_ERROR_MEMORY_(?:APERTURE_VIOLATION|FAULT)|"
        r"an illegal address|invalid address space|cudaErrorInvalidAddressSpace|invalid program counter|"
        r"cudaErrorInvalidPc|" + numbered("700|77|717|718"),
        Severity.SEV2, Scope.PROCESS, Category.ILLEGAL_MEMORY, Strength.CAUSE,
        "a kernel touched memory that is not its own: restart; the same place again is code, the same GPU hardware",
        DOCS,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    Rule(
        "cuda.gpu-hang", r"HW Exception by GPU node.{0,80}GPU Hang",
        Severity.SEV2, Scope.GPU, Category.OTHER_CUDA, Strength.CAUSE,
        "the GPU did not answer its runtime and was reset: restart, and suspect it", "ROCr runtime, VMFaultHandler",
        "HW Exception by GPU node-9 (Agent handle: 0x55d0) reason :GPU Hang",
    ),
    Rule(
        "cuda.teardown", r"(?i)CUDA warning: .{0,80}\(function (?:destroyEvent|~?CUDA\w*)|driver shutting down|"
        r"cudaErrorCudartUnloading|CUDA_ERROR_DEINITIALIZED|" + numbered("4: driver|29"),
        Severity.SEV2, Scope.PROCESS, Category.OTHER_CUDA, Strength.ECHO,
        "printed while the process unwinds: the error came before", "c10/cuda/impl/CUDAGuardImpl.h",
        "[W CUDAGuardImpl.h:115] Warning: CUDA warning: unspecified launch failure (function destroyEvent)",

        is_final=True,
    ),
    Rule(
        "cuda.launch-failure", r"(?i)unspecified launch failure|cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED|"
        r"CUDA_ERROR_(?:ILLEGAL_INSTRUCTION|LAUNCH_TIMEOUT|HARDWARE_STACK_ERROR|INVALID_PC)\b|"
        r"misaligned address|cudaErrorMisalignedAddress|illegal instruction was encountered|hardware stack error|"
        r"cudaErrorIllegalInstruction|cudaErrorHardwareStackError|launch timed out and was terminated|"
        r"cudaErrorLaunchTimeout|CUDA_ERROR_MISALIGNED_ADDRESS|"
        + numbered("719|716|715|714|702|73|74|72|6|4"),
        Severity.SEV2, Scope.PROCESS, Category.OTHER_CUDA, Strength.CAUSE,
        "a kernel died: the context is lost, a new process is not", DOCS,
        "RuntimeError: CUDA error: unspecified launch failure",
    ),
    Rule(
        "cuda.library", r"CUBLAS_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED|NOT_INITIALIZED|MAPPING_ERROR|"
        "ALLOC_FAILED)|"
        r"CUDNN_STATUS_(?:\w*INTERNAL_ERROR|EXECUTION_FAILED|NOT_INITIALIZED|MAPPING_ERROR|ALLOC_FAILED)|"
        r"CUSOLVER_STATUS_\w+|CUFFT_(?:INTERNAL|EXEC)\w+|cusparse\w* error|cuDNN error|cublas error|"
        r"Unable to find a valid cuDNN algorithm",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_CUDA, Strength.CAUSE,
        "a library's call failed without saying why: memory, an earlier kernel or the device",
        "cuBLAS and cuDNN manuals",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    ),
    Rule(
        "cuda.initialization",
        r"(?i)CUDA initialization|NVML_SUCCESS == r|CUDA call failed lazily|cudaErrorInitializationError|"
        r"CUDA error: initialization error|"
        r"CUDA unknown error|cudaErrorUnknown|CUDA_ERROR_UNKNOWN|CUDA driver initialization failed|"
        + numbered("3|30|999"),
        Severity.SEV2, Scope.PROCESS, Category.GPU_DRIVER, Strength.CAUSE,
        "the driver would not start for this process: restart once, then look at the node", DOCS,
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
    ),
    Rule(
        "cuda.other", r"CUDA error: (?!invocation)\w|CUDA error \d+|CUDA driver error|cudaError[A-Z]\w+|"
        "CUDA_ERROR_[A-Z_]+|"
        r"(?i:cuda runtime error)|Cuda failure|unhandled cuda error|\bhipError[A-Z]\w+",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_CUDA, Strength.EXCEPTION,
        "a CUDA error without a rule of its own: the paper's other CUDA errors", "Unicron, table of error severities",
        "NCCL WARN Cuda failure 'this is a new kind of failure'",
    ),
)  # fmt: skip

FAMILY = Family("cuda", RULES)
