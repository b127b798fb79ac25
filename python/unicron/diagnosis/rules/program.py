"""What a Python program says of itself: exceptions, wrong data and configuration, numbers that went bad, and "
"what it was
doing last.

An exception of Python's own is deterministic more often than not: restarting repeats it (FATAL). Exceptions that
speak of bytes nobody wrote (a UnicodeDecodeError in an object received or loaded) are corruption on one rank: restart.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

PYTHON = "Python built-in exceptions"
TORCH = "torch error messages"
MEGATRON = "megatron.core, megatron.training"
BUILTIN = (
    r"AssertionError|TypeError|KeyError|AttributeError|NameError|IndexError|ImportError|ModuleNotFoundError|"
    r"SyntaxError|"
    r"IndentationError|ValueError|NotImplementedError|ZeroDivisionError|RecursionError|FileNotFoundError|"
    r"FileExistsError|"
    r"NotADirectoryError|IsADirectoryError|UnboundLocalError|JSONDecodeError|OverflowError|LookupError|StopIteration|"
    r"TomlDecodeError|YAMLError|ScannerError|ParserError|ValidationError|ConfigAttributeError|ConfigKeyError|"
    r"MissingMandatoryValue|HFValidationError|InstantiationException|OmegaConf\w*Error|HydraException|"
    r"ArgumentError|BackendCompilerFailed"
)

ACTIVITY_RULES = (
    Rule(
        "program.finished",
        r"(?i)\b(?:successfully |finished |done |completed )(?:saved|saving|loaded|loading|writing|written|building|"
        r"evaluating)\b|\bsaved (?:checkpoint|model|state)",
        Severity.INFO, Scope.PROCESS, Category.NONE, Strength.ACTIVITY,
        "what it was doing is done", MEGATRON, "successfully saved checkpoint at iteration 500 to /ckpt",
    ),
    Rule(
        "program.saving",
        r"(?i)\b(?:saving|writing|start(?:ing|ed)? (?:to )?save|begin save|uploading).{0,60}(?:checkpoint|model|"
        r"state|ckpt|iteration)",
        Severity.INFO, Scope.STORAGE, Category.TASK_HANG, Strength.ACTIVITY,
        "it was saving a checkpoint", MEGATRON, "saving checkpoint at iteration 500 to /ckpt",
    ),
    Rule(
        "program.loading",
        r"(?i)\b(?:loading|reading|building|downloading).{0,60}(?:checkpoint|dataset|index|data ?set|tokenizer|"
        r"weights|shard)",
        Severity.INFO, Scope.STORAGE, Category.TASK_HANG, Strength.ACTIVITY,
        "it was loading data or a checkpoint", MEGATRON, "loading distributed checkpoint from /ckpt at iteration 500",
    ),
    Rule(
        "program.evaluating",
        r"(?i)\b(?:evaluating|running validation|start(?:ing)? evaluation|validating)\b|compiling (?:model|"
        r"kernel|dataset)|"
        r"torch\.compile|tuning|garbage collect",
        Severity.INFO, Scope.PROCESS, Category.TASK_HANG, Strength.ACTIVITY,
        "it was doing something that takes long on one rank only", MEGATRON, "Evaluating iter 3/100",
    ),
    Rule(
        "program.stack",
        r'^\s*File ".{1,300}", line \d+ in \w|^\s+[\w<>.]{1,80} \([\w./<>-]{1,200}\.py:\d+\)',
        Severity.INFO, Scope.PROCESS, Category.TASK_HANG, Strength.ACTIVITY,
        "its stack is outside of any collective", "faulthandler, py-spy", '  File "data.py", line 7 in decode',
    ),
)  # fmt: skip

BAD = r"(?i:NaNs?|Infs?|non-?finite)\b"

NUMBER_RULES = (
    Rule(
        "program.bad-numbers",
        rf"\b(?i:ranks?)[ =:#\[]{{1,2}}\d.{{0,80}}\W{BAD}.{{0,160}}(?i:grad|norm|bucket|loss|local)|"
        rf"(?<!\w){BAD}.{{0,80}}\b(?i:on|at|in|by|from|of) (?i:global )?(?i:ranks?)[ =:#\[]{{1,2}}\d|"
        rf"(?i:loss|grad\w*|norm) (?i:on|at|in|by|from|of) (?i:global )?(?i:ranks?)[ =:#\[]{{1,2}}\d.{{0,20}}\W{BAD}|"
        rf"(?i:found|unexpected result)\W*{BAD}.{{0,160}}(?i:grad|norm|bucket|loss|local)|"
        rf"(?i:found|detected) {BAD}|(?i:grad(?:ient)?s? (?:norm )?(?:contain|has|have|is|are)) {BAD}|"
        r"(?i:silent data corruption)|"
        rf"SDC (?i:detected|suspect)|(?i:unexpected result) {BAD}|(?i:raising error).{{0,60}}\b{BAD}",
        Severity.SEV2, Scope.GPU, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "one rank computed a number that is none: restart, and suspect its GPU",
        "megatron.core.distributed, check for NaN in gradient",
        "RuntimeError: Rank 1, node n1, device 3, iteration 70: Unexpected result nan (message='found NaN in "
        "local grad norm')",
        is_of_named=True,
    ),
    Rule(
        "program.scale-reduced",
        r"(?i)(?:gradient overflow|OVERFLOW!).{0,60}skipping step",
        Severity.INFO, Scope.JOB, Category.OTHER_SOFTWARE, Strength.NOISE,
        "dynamic loss scaling found its limit, as it does now and then", "apex, DeepSpeed",
        "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        is_final=True,
    ),
    Rule(
        "program.diverged",
        r"(?i)(?:lm loss|loss|grad(?:ient)? ?norm|perplexity)\s*[:=]\s*(?:nan|inf|-inf)\b|loss (?:is|became|"
        r"was) (?:nan|inf)|"
        r"(?:nan|inf) loss|loss (?:diverged|exploded)|loss scale.{0,40}(?:minimum|already at|too small)|"
        r"minimum loss scale|"
        r"encountered nan|nan (?:or inf )?(?:found|encountered|detected)|Function '\w+' returned nan",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "training diverged: data, learning rate or code; restarting repeats it", MEGATRON,
        "iteration 900 | lm loss: nan | grad norm: 7.1",
        is_of_named=True,
    ),
    Rule(
        "program.nan-iterations",
        r"number of (?:nan iterations\s*[:=]\s*[1-9]|skipped iterations\s*[:=]\s*[1-9]\d{2,})",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "iterations without a usable gradient: training diverged", MEGATRON,
        "iteration 900 | number of skipped iterations:   0 | number of nan iterations:   1 |",
    ),
)  # fmt: skip

EXCEPTION_RULES = (
    Rule(
        "program.residual-file",
        r"FileNotFoundError.{0,80}(?:pymp-|/tmp/\w*sock|torch_shm)|FileNotFoundError.{0,60}\.lock\b",
        Severity.INFO, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.NOISE,
        "a finalizer did not find what another process had taken away", "multiprocessing/util.py",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/pymp-x1'",
        is_final=True,
    ),
    Rule(
        "program.corrupt-metadata",
        r"(?i)(?:metadata|checkpoint|file|index).{0,60}(?:UnicodeDecodeError|codec can't decode)",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "what was read is not what was written: try again, then the checkpoint before", PYTHON,
        "reading checkpoint metadata: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff",
    ),
    Rule(
        "program.corrupt-object",
        r"UnicodeDecodeError|codec can't decode|invalid (?:continuation|start) byte|invalid load key|UnpicklingError|"
        r"_pickle\.\w+Error|msgpack.{0,40}(?:exception|error)|\bDecodeError\b",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "an object arrived damaged: restart once", PYTHON,
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xde in position 8: invalid continuation byte",
    ),
    Rule(
        "program.forbidden",
        r"(?i)PermissionError|permission denied|Errno 13\b|Operation not permitted|Errno 1\b",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "rights are missing: restarting repeats it",
        PYTHON, "PermissionError: [Errno 13] Permission denied: '/data/cache.lock'",
    ),
    Rule(
        "program.shapes",
        r"(?i)size mismatch|shapes? (?:cannot be multiplied|mismatch)|must match the size|"
        r"Expected all tensors to be on the same device|"
        r"does not require grad|Missing key\(s\)|Unexpected key\(s\)|Error\(s\) in loading state_dict|"
        r"Expected to have finished reduction|"
        r"marked (?:as )?ready (?:only once|twice)|modified by an inplace operation|"
        r"backward through the graph a second time|"
        r"Sizes of tensors must match|shape '\[.{0,60}is invalid|expected scalar type|index out of range|"
        r"out of bounds|"
        r"stack expects each tensor|split_with_sizes|invalid for input of size|dtype mismatch|not divisible by|"
        r"must be divisible|"
        r"world.?size .{0,60}(?:not|must|mismatch)|unused parameters|Given normalized_shape|"
        r"expects? .{0,40} dimension",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "shapes, types or names do not fit: code or configuration", TORCH,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)",
    ),
    Rule(
        "program.configuration",
        r"(?i)unrecognized arguments|invalid (?:config|choice|option)|the following arguments are required|"
        r"error: argument|"
        r"unknown (?:argument|option|config)|no module named|cannot import name|undefined symbol|"
        r"cannot open shared object|"
        r"GLIBC\w* not found|version `\w+' not found|error while loading shared libraries|command not found|"
        r"No such file or directory|"
        r"can't open file|exec format error|Error building extension|is not a valid|MisconfigurationException|"
        r"config(?:uration)? error|"
        r"environment variable .{0,60}(?:expected|not set|missing)|ninja.{0,40}(?:failed|stopped)|Errno 2\b|"
        r"nvcc.{0,40}(?:fatal|error)",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a setting, a file or a library is wrong or missing", PYTHON,
        "train.py: error: unrecognized arguments: --no-such-option",
    ),
    Rule(
        "program.exception",
        rf"(?:^|[\s.:\]'\"])\w*(?:{BUILTIN})\b(?:: |:$|$|\()",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "an error of the program or its data: restarting repeats it", PYTHON,
        "[rank2]: KeyError: 'labels'",
    ),
    Rule(
        "program.of-another",
        r"HorovodInternalError|Horovod has been shut ?down|\bAsyncEngineDeadError|\bEngineDeadError|"
        r"Engine core (?:initialization failed|proc\w* died)|WorkerProc initialization failed|See (?:root cause|stack "
        r"trace) (?:above|\(above\)|for (?:the )?root cause)|(?:Received|received) (?:sigquit|SIGQUIT) from a child|"
        r"errors_impl\.(?:Unavailable|Aborted|Cancelled)Error|Collective ops is aborted by|"
        r"\bRPC call to \w+ timed out|(?:Xla|Jax)RuntimeError: (?:UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)|"
        r"UCX +ERROR .{0,80}(?:Endpoint timeout|remote peer|unhandled timeout)",
        Severity.SEV3, Scope.PROCESS, Category.LOST_CONNECTION, Strength.ECHO,
        "what a framework raises because another process failed", "Horovod, vLLM, SGLang, TensorFlow, XLA, UCX",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.",
    ),
    Rule(
        "program.complaint",
        r"(?:Error|Exception)\b: .*(?i:expected|\bmust\b|\bshould\b|cannot|can't|only support|not supported|"
        r"unsupported|"
        r"not implemented|\brequires?\b|but got|doesn't exist|does not exist|could not (?:override|find|locate)|"
        r"already been|"
        r"is not defined|not callable|has no attribute|not allowed|no such option|is being used)",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.EXCEPTION,
        "an exception that says what was wanted instead: code, data or configuration", PYTHON,
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
    ),
    Rule(
        "program.other-exception",
        r"(?:^|[\s.:\]'\"])[A-Za-z_][\w.]*(?:Error|Exception|Fault|Failure)\b(?:: |:$|$)",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.EXCEPTION,
        "an exception that no rule knows: the paper's other software errors", "Unicron, table of error severities",
        "mylib.StrangeError: the moon was full",
    ),
    Rule(
        "program.unknown-failure",
        r"^(?!.*\b(?:INFO|WARN|WARNING|DEBUG|Warning)\b).*"
        r"(?:\b(?:ERROR|FATAL|CRITICAL)\b|(?i:\bfailed\b|\bfailure\b|\bfatal\b|\berror:|\bcrashed\b))",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.UNKNOWN,
        "a failure that no rule knows: the paper's other software errors", "Unicron, table of error severities",
        "the flux capacitor failed",
    ),
)  # fmt: skip

FAMILY = Family("program", (*NUMBER_RULES, *EXCEPTION_RULES, *ACTIVITY_RULES))
