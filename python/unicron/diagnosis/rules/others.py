"""What a rank, a monitor or a report says of another rank: who lags, who is missing, who is not heard, who called
something else, who is slow, who ended.

The line is about whom it names (the group `rank`), never about who says it. Whoever is accused and accuses another one
itself is in the middle of a chain; the end of the chain is meant (suspects.py). A measurement of speed is no failure:
it counts where nothing else does.
"""

from __future__ import annotations

from unicron.diagnosis.naming import NUMBERS
from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

REST = (
    r"(?i:\b(?:all (?:the )?(?:others?|rest|remaining)|(?:the )?others|the (?:other|rest|remaining|majority)|"
    r"other ranks|every(?:one|body))\b)"
)
STUCK = r"(?i:pending|time.?d? ?out|stuck|stall|hang|hung|blocked|for \d|after \d)"
# What members of a group have to call alike.
CALL = (
    r"(?i:all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|barrier|collective|shape|numel|seq|tensor|"
    r"params|dtype)"
)


def listed(group: str) -> str:
    """Pattern of a list of ranks, in brackets or not, as the group rank_<group>."""
    return rf"[\[{{(]?(?P<rank_{group}>{NUMBERS})\b"


def who(group: str) -> str:
    """Pattern of the ranks that a line names: rank 3, ranks [12, 14], rank(s): 7."""
    return rf"(?i:\branks?(?:\(s\))?)[ =:]{{1,2}}{listed(group)}[\]}})]?"


LATE_RULES = (
    Rule(
        "watchdog.desync",
        rf"\[(?P<rank>{NUMBERS})\] (?:finished collective #\d+, but didn't join|joined but didn't finish collective)|"
        rf"\bRanks? (?P<rank_b>{NUMBERS}) failed to pass monitoredBarrier|"
        rf"{who('c')} (?:is|are) the (?:lagging|dead|mismatched) ranks?|"
        r"\bCulprit rank (?P<rank_d>\d{1,7})\b|"
        rf"{who('e')} (?i:(?:is|are) (?:still )?(?:at|in|on) (?:collective|seq\w*|work|step|iteration|op\w*)) ?[#=:]?\d"
        rf".{{0,40}}{REST}",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.CAUSE,
        "torch compared the ranks and says who lags",
        "torch TraceUtils.h (desync debug), ProcessGroupGloo.cpp, flight_recorder/components/types.py",
        "  - [1] finished collective #8, but didn't join collective #9 (count from 1)",
    ),
    Rule(
        "watchdog.missing",
        rf"(?i:missing[_ ]ranks?(?:\s*[=:(]{{1,2}}| are|(?= ))\s*){listed('a')}|"
        rf"{who('b')} (?i:did(?:n't| not)|never|ha(?:s|ve)(?:n't| not)|failed to|(?:is|are) not|not|"
        r"(?:has|have|is|are) yet to) (?i:join|arriv|reach|enter|respond|participat|check(?:ed)? in|report|call|launch|"
        r"start|post|show(?:ed)? up)|"
        rf"^\s*(?P<rank_c>{NUMBERS}): \[[\w.]*(?i:allreduce|allgather|broadcast|alltoall)|"
        rf"{who('f')} (?i:absent|missing|not (?:present|ready|there)|offline)\b|"
        rf"(?i:\bnot (?:in|at|part of|present in) .{{1,30}}?: ?)(?=[\[{{(\d]){listed('g')}|"
        r"(?i:\b(?:not[ _]joined|un-?joined|absent|not[ _]arrived)(?:[ _]ranks?)?)[ =:]{1,3}"
        rf"(?:(?i:(?:by )?ranks? )|(?=[\[{{(])){listed('d')}|"
        r"(?i:(?:joined|arrived|present|ready|reached|checked in|responded)\b.{0,60}\b(?:missing|absent|without|except)"
        rf"[ =:]{{1,3}}(?:ranks? )?){listed('e')}",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "another rank counted who came and misses this one: late, stuck or dead",
        "torch elastic/utils/store.py, flight_recorder; horovod stall_inspector.cc",
        "DistStoreError: Timed out waiting on barrier on rank 0 (world_size=4, missing_ranks=[1], timeout=0:30:00)",
    ),
    Rule(
        "watchdog.present",
        rf"\[ready ranks: (?P<present>{NUMBERS})\]|"
        rf"{STUCK}.{{0,80}}?(?i:\b(?:ready|joined|arrived|present|reached)(?:[ _]ranks?| by)?[ =:]{{1,3}})"
        rf"[\[{{(](?P<present_b>{NUMBERS})[\]}})]",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "another rank counted who came, and this one is not among them: late, stuck or dead",
        "horovod stall_inspector.cc", "allreduce.conv1.weight [ready ranks: 0, 2, 3]",
    ),
    Rule(
        "watchdog.unheard",
        rf"{who('a')} (?i:(?:(?:is|are) )?(?:unresponsive|unreachable|unhealthy|faulty|guilty)\b|"
        rf"(?:is|are) (?:hung|stuck)\b(?!.{{0,20}}{CALL})|(?:is|are) (?:missing|dead|silent|lagging|"
        r"behind|late)(?=\s*$|\s?[.,:;()]| by | for | at )|"
        r"(?:has |have )?(?:stopped (?:responding|making progress|sending)|disconnected|went (?:away|silent|down))|"
        r"(?:heart)?beats? (?:timed out|timeout|lost|missed|expired|missing|stale)|"
        r"missed (?:its |\d+ )?heartbeat|lost (?:its )?heartbeat)|"
        r"(?i:\bno (?:heartbeats?|response|reply|answer|progress|contribution|data|message)(?: received)? "
        r"(?:from|of|on)|"
        r"\b(?:lost (?:contact|connection) (?:to|with)|not heard from|(?:missed|stale|lost) heartbeats? (?:of|from))) "
        rf"(?i:worker |global )?{who('b')}|"
        rf"(?i:\blost (?:peer|worker|member)\b.{{0,30}}?){who('e')}|"
        rf"(?i:\bheartbeats? (?:of|from) ){who('c')}.{{0,20}}?"
        r"(?i:lost|missed|missing|stale|late|expired|stopped|timed? ?out|not received)|"
        rf"(?i:\bheartbeat[ _](?:missed|lost|timeout|expired)\b.{{0,20}}?\brank[\"']?[ =:]{{1,2}}){listed('d')}",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "who watches the ranks hears nothing of this one any more: stuck or dead", "monitors of ranks",
        "monitor: no heartbeat from rank 1 for 60 s",
    ),
    Rule(
        "watchdog.blamed",
        r"(?<!max )(?<!num )(?<!of )\b(?i:(?:guilty|culprits?|faulty|suspect(?:ed)?|offending|failed|failing|dead|"
        r"lagging|unresponsive|stalled|stuck|hung|root cause(?: is|:)?|(?:first|initial) (?:failure|error|fault) "
        r"(?:on|in|at|from|is|was)|(?:caused|blocked) by) "
        rf"(?:global )?){who('a')}",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "somebody found this rank to be the one, and does not say why", "reports of failures",
        "monitor: suspected rank 1",
    ),
    Rule(
        "watchdog.no-heartbeat",
        r"RankMonitorServer:(?P<rank>\d{1,7})\].{0,40}Did not get|"
        r"\btask:(?P<rank_b>\d{1,7}) heartbeat timeout|^\s*/job:\w+/replica:\d+/task:(?P<rank_c>\d{1,7})\s*$",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "who watches the ranks hears nothing of this one any more: stuck or dead",
        "nvidia-resiliency-ext rank_monitor_server.py; XLA coordination_service.cc",
        "[WARNING] [RankMonitorServer:1] Did not get subsequent heartbeat. Waited 171.92 seconds.",
        is_final=True,
    ),
    Rule(
        "watchdog.waited-for",
        rf"{STUCK}.{{0,120}}?(?i:(?:wait(?:ing|s|ed)|pending) (?:for|on) (?:global )?){who('a')}|"
        rf"(?i:waiting (?:for|on) \d+ (?:more |other )?ranks?[ :(]{{1,3}}){listed('e')}|(?i:pending on ){who('f')}|"
        rf"(?i:wait(?:ing|s|ed) (?:for|on) (?:global )?){who('b')}(?=.{{0,80}}{STUCK})|"
        r"(?i:has not received .{0,60}from remote rank: ?)\[(?P<rank_d>\d{1,7})\]|"
        r"\b(?i:recv|receive|send|read|write|message|reply)\w* (?i:from|to) (?i:rank )(?P<rank_c>\d{1,7})\b.{0,30}"
        r"(?i:timed? ?out|failed|reset|closed|refused|lost)",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "another rank waits for this one, which does not come: late, stuck or dead", "HCCL (EI0002), reports of hangs",
        "ALLREDUCE pending for 610 s, waiting for rank 1",
    ),
    Rule(
        "watchdog.not-in-ras", r"^\s*Rank (?P<rank>\d{1,7}) -- GPU \d",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "NCCL's own count misses this rank, or finds it behind the others", "NCCL src/ras/client_support.cc",
        "  Rank 1 -- GPU 4 managed by process 323032 on node 10.0.0.4",
    ),
    Rule(
        "watchdog.straggler",
        rf"STRAGGLER DETECTION.{{0,120}}Affected ranks: [\[{{](?P<rank>{NUMBERS}|\w+\(rank=\d.{{0,2000}})[\]}}]|"
        rf"(?<!no )\b(?i:stragglers?\b(?:(?: report| found| detected| identified| is| are| on| at|[:=,;])\s?){{0,4}}"
        rf"\s?){who('b')}|"
        rf"(?i:\bstragglers?[ =:]{{1,3}})(?=[\[{{(]){listed('c')}|(?i:\bslow (?:global )?){who('e')}|"
        rf"{who('d')} (?i:(?:is|are) (?:an? )?(?:stragglers?\b|\d[\d.]*x slower|slower than))",
        Severity.SEV2, Scope.GPU, Category.TASK_HANG, Strength.SLOW,
        "it was measured slower than the others: suspect its GPU, if nothing else is wrong",
        "nvidia-resiliency-ext straggler detection",
        "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: [1]",
    ),
)  # fmt: skip

OTHER_RULES = (
    Rule(
        "nccl.odd-one",
        rf"{who('a')} (?i:called|is (?:running|in|at)|entered|issued|launched|has|used|sent|got) "
        rf".{{0,60}}?{CALL}.{{0,80}}?(?:[,;] (?i:and )?|"
        rf"(?i:\b(?:while|but|whereas|unlike|instead of)\b).{{0,60}}?){REST}|"
        rf"{CALL}.{{0,30}} (?i:on|of|from) {who('b')} (?i:differs?|deviates?|is different|"
        rf"(?:does|do) not (?:match|agree)|(?:is|are) inconsistent|mismatch\w*).{{0,20}}?{REST}|"
        r"(?i:\ball (?:the )?(?:other )?ranks (?:called|agree|entered|are (?:in|at|running)))"
        rf".{{0,60}}?{CALL}.{{0,60}}?(?i:\bexcept (?:for )?){who('c')}",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "it called something else than all others: code or data that differ between ranks", "reports of mismatches",
        "collective mismatch: rank 1 called ALLGATHER while all other ranks called ALLREDUCE",
        is_final=True,
    ),
    Rule(
        "process.first-to-fail",
        r"Process name: \[\[\d+,\d+\],(?P<rank>\d{1,7})\]|MPI_ABORT was invoked on rank (?P<rank_b>\d{1,7})\b|"
        r"application called MPI_Abort\(.{1,60}\) - process (?P<rank_d>\d{1,7})\b|"
        r"\bVllmWorker(?:Process)?-(?P<rank_c>\d{1,5}) died\b",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.DEATH,
        "the launcher says whose process failed", "Open MPI, MPICH, vLLM multiproc_executor.py",
        "  Process name: [[12167,1],1]",
    ),
    Rule(
        "process.rank-ended",
        rf"\b(?i:rank)s?[ \[(=:]{{1,2}}(?P<rank>{NUMBERS})[\])]?:? (?:\([^()]{{1,60}}\) )?"
        r"(?i:(?:has |have |was |were |is |are |worker |process |unexpectedly |suddenly ){0,3}"
        r"(?:died|crashed|killed|failed|disappeared|vanished|preempted|gone|"
        r"(?:exited|terminated|ended) (?:unexpectedly|prematurely|abnormally))\b)"
        r"(?!\D{0,20}(?i:\bto\b|success|SIGTERM|signal 15|timed? ?out))"
        r"(?!.{0,60}(?i:NCCL|gloo|connection|remote process|reset by|broken pipe))",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.DEATH,
        "somebody saw this rank end, and does not say why", "agents, launchers, lmdeploy",
        "agent: rank 1 died unexpectedly",
    ),
)  # fmt: skip

FAMILY = Family("others", (*LATE_RULES, *OTHER_RULES))
