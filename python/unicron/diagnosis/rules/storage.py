"""What file systems and object stores say through a process. A full disk needs a person; a stale handle, a "
"restart; an
object store that is slow, a second try.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

ERRNO = "errno(3)"

RULES = (
    Rule(
        "storage.full",
        r"(?i)no space left on device|(?-i:\bENOSPC\b)|StorageFull|disk (?:is )?full|not enough (?:disk )?space|"
        r"Errno 28\b|code: 28\b|"
        r"insufficient (?:disk|storage) space",
        Severity.FATAL, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the disk is full: somebody has to make room",
        ERRNO, "OSError: [Errno 28] No space left on device: 'ckpt/iter_10'",
    ),
    Rule(
        "storage.quota",
        r"(?i)disk quota exceeded|(?-i:\bEDQUOT\b)|Errno 122\b|quota exceeded|file too large|Errno 27\b",
        Severity.FATAL, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the quota is used up: somebody has to make room", ERRNO, "OSError: [Errno 122] Disk quota exceeded",
    ),
    Rule(
        "storage.write-failed",
        r"(?i)PytorchStreamWriter failed|inline_container.{0,60}(?:write|unexpected pos)|file write failed|"
        r"unexpected pos \d+ vs",
        Severity.FATAL, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.EXCEPTION,
        "a checkpoint could not be written, nearly always because the disk is full",
        "torch caffe2/serialize/inline_container.cc",
        "RuntimeError: [enforce fail at inline_container.cc:300] . unexpected pos 64 vs 0",
    ),
    Rule(
        "storage.torn-file", r"EOFError: Ran out of input",
        Severity.FATAL, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a file ends too early: the same file ends there the next time", "Python pickle",
        "EOFError: Ran out of input",
    ),
    Rule(
        "storage.torn-checkpoint",
        r"(?i)PytorchStreamReader failed|failed finding central directory|invalid header or archive is corrupted|"
        r"unpickling stack underflow|pickle data was truncated|UnpicklingError|HeaderTooLarge|InvalidHeader|"
        r"MetadataIncompleteBuffer|"
        r"not a zip ?file|BadZipFile|checkpoint.{0,60}(?:corrupt|incomplete|truncated)|incomplete checkpoint|"
        r"checksum (?:mismatch|error)|crc (?:mismatch|error)",
        Severity.FATAL, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a file is torn: the same file is torn the next time; take the checkpoint before it",
        "torch/serialization.py",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ),
    Rule(
        "storage.stale",
        r"(?i)stale (?:NFS )?file handle|(?-i:\bESTALE\b)|Errno 116\b",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the file was replaced under the process: opening it again helps",
        ERRNO, "OSError: [Errno 116] Stale file handle",
    ),
    Rule(
        "storage.io-error",
        r"(?i)input/output error|(?-i:\bEIO\b)|Errno 5\b|remote I/O error|Errno 121\b|os error 5\b",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a read or write failed below the file system: once more, then look at the disk or mount", ERRNO,
        "OSError: [Errno 5] Input/output error",
    ),
    Rule(
        "storage.mount-gone",
        r"(?i)transport endpoint|(?-i:\bENOTCONN\b)|Errno 10[78]\b|host is down|Errno 112\b|no such device|"
        r"Errno 19\b|"
        r"cannot send after|Errno 6\b|\bfuse\b.{0,60}(?:error|disconnected)",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a mounted file system went away", f"{ERRNO}, Lustre, FUSE",
        "OSError: [Errno 107] Transport endpoint is not connected",
    ),
    Rule(
        "storage.object-forbidden",
        r"(?i)NoCredentials|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|403 Forbidden|"
        r"PartialCredentials|NoSuchBucket|NoSuchKey|401 Client Error|403 Client Error|404 Client Error|"
        r"RepositoryNotFound|"
        r"\(403\)|status code:? 403|GatedRepo|EntryNotFound|LocalEntryNotFound",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the object store refuses: keys or names are wrong", "S3 error responses",
        "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject "
        "operation: Access Denied",
    ),
    Rule(
        "storage.object-slow",
        r"(?i)ReadTimeoutError|Read timed out|SlowDown|ServiceUnavailable|reduce your request rate|"
        r"EndpointConnectionError|"
        r"ConnectTimeoutError|HTTPSConnectionPool|HTTPConnectionPool|Max retries exceeded|IncompleteRead|"
        r"ProtocolError|"
        r"(?:50[0234]) (?:Server|Service|Bad|Gateway|Internal)|InternalError\) when calling|RequestTimeout|"
        r"ResponseStreamingError|"
        r"TooManyRequests|\(429\)|429 Client Error|ConnectionClosedError|s3.{0,80}(?:time.?out|timed out|"
        r"connection)|Throttling|"
        r"ServerBusy|OperationTimedOut|gcs.{0,60}(?:timeout|unavailable)|curl.{0,60}(?:error|timed out)|"
        r"aiohttp.{0,80}(?:Timeout|Disconnected)",
        Severity.SEV3, Scope.STORAGE, Category.OTHER_NETWORK, Strength.CAUSE,
        "the object store was slow or away: try again", "S3 error responses, urllib3",
        "botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: \"s3://bucket/key\" Read timed out.",
    ),
    Rule(
        "storage.busy",
        r"(?i)device or resource busy|Errno 16\b|resource temporarily unavailable|Errno 11\b|text file busy|"
        r"(?:file|lock).{0,40}(?:already locked|is locked)|BlockingIOError|Timeout.{0,40}\.lock\b",
        Severity.SEV3, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "somebody else holds the file: try again", ERRNO, "OSError: [Errno 16] Device or resource busy: '.nfs0001'",
    ),
)  # fmt: skip

FAMILY = Family("storage", RULES)
