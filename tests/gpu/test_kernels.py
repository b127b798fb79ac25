"""Kernels against their CPU references: the same bits."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from unicron import _core  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """This process gets a context: these tests need no second one."""
    torch.cuda.set_device(0)
    _core.load_kernels(0)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("num_bytes", [16, 24, 8, 1, 4097, 1 << 20, (1 << 24) + 13, 3 * (64 << 20) + 16])
def test_digest(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    on_gpu = data.cuda()
    torch.cuda.synchronize()
    for offset in (0, 160):
        expected = _core.digest(data.numpy(), offset)
        assert _core.gpu_digest(0, [(on_gpu.data_ptr(), num_bytes, offset)], 10_000) == expected


def test_digests_of_pieces_add_up() -> None:
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    on_gpu = data.cuda()
    torch.cuda.synchronize()
    cuts = [0, 16, 4096, 4112, 1 << 19, 1 << 20]
    pieces = [(on_gpu.data_ptr() + a, b - a, a) for a, b in itertools.pairwise(cuts)]
    assert _core.gpu_digest(0, pieces[::-1], 10_000) == _core.digest(data.numpy(), 0)
    assert _core.gpu_digest(0, [], 10_000) == 0


@pytest.mark.parametrize("mode", ["plain", "overlapped", "fused"])
@pytest.mark.parametrize("num_bytes", [16, 1 << 20, 5 * (64 << 20) + 48])
def test_copies_arrive_with_their_digest(mode: str, num_bytes: int) -> None:
    copier = _core.GpuCopier(0)
    source = torch.randint(-(1 << 62), 1 << 62, (num_bytes // 8,), dtype=torch.int64, device="cuda")
    for _ in range(2):
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        digest, ms = copier.copy(target.data_ptr(), source.data_ptr(), num_bytes, mode, 10_000)
        assert torch.equal(source, target) and ms > 0
        assert digest == (0 if mode == "plain" else _core.digest(source.cpu().numpy(), 0))


def test_copies_between_gpus(two_gpus: None) -> None:
    copier = _core.GpuCopier(0)
    copier.enable_peer(1)
    source = torch.randint(-(1 << 62), 1 << 62, ((256 << 20) // 8,), dtype=torch.int64, device="cuda:1")
    torch.cuda.synchronize(1)
    for mode in ("plain", "overlapped", "fused"):
        target = torch.zeros(source.shape, dtype=torch.int64, device="cuda:0")
        torch.cuda.synchronize(0)
        digest, _ = copier.copy(target.data_ptr(), source.data_ptr(), source.nbytes, mode, 10_000)
        assert torch.equal(source.cpu(), target.cpu())
        assert mode == "plain" or digest == _core.digest(source.cpu().numpy(), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [0, 20, 40])
def test_exact_sums(dtype: torch.dtype, exponent: int) -> None:
    count, num_terms = 1_000_003, 4
    sums = torch.randint(-(1 << 40), 1 << 40, (count,), dtype=torch.int64)
    terms = (torch.randn(count, dtype=torch.float64) * 10.0 ** torch.randint(-30, 6, (count,))).to(dtype)
    terms[:4] = torch.tensor([float("inf"), float("nan"), 3e38, -0.0]).to(dtype)
    on_gpu, terms_gpu = sums.cuda(), terms.cuda()
    flags = torch.zeros(1, dtype=torch.int64, device="cuda")
    is_bf16 = dtype == torch.bfloat16
    _core.gpu_exact_accumulate(
        0, on_gpu.data_ptr(), terms_gpu.data_ptr(), count, is_bf16, exponent, num_terms, flags.data_ptr(), stream()
    )
    bits = terms.view(torch.int16).numpy().view("uint16") if is_bf16 else terms.numpy()
    expected = sums.numpy().copy()
    found = _core.exact_accumulate(expected, bits, is_bf16, exponent, num_terms)
    assert found == 3 and int(flags) == found
    assert torch.equal(on_gpu.cpu(), torch.from_numpy(expected))
    values = torch.empty(count, dtype=torch.float32, device="cuda")
    _core.gpu_exact_to_float(0, values.data_ptr(), on_gpu.data_ptr(), count, exponent, stream())
    values_cpu = torch.empty(count, dtype=torch.float32)
    _core.exact_to_float(values_cpu.numpy(), expected, exponent)
    assert torch.equal(values.cpu().view(torch.int32), values_cpu.view(torch.int32))


@pytest.mark.parametrize("pieces", [1, 3])
def test_exact_norm(pieces: int) -> None:
    values = torch.randn(2_000_001)
    on_gpu = values.cuda()
    parts, flags = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 1))
    for piece in on_gpu.chunk(pieces):
        _core.gpu_exact_sum_squares(
            0, parts.data_ptr(), piece.data_ptr(), piece.numel(), 50, flags.data_ptr(), stream()
        )
    expected = torch.zeros(4, dtype=torch.int64)
    assert _core.exact_sum_squares(expected.numpy().view("uint64"), values.numpy(), 50) == int(flags) == 0
    got = _core.exact_wide_value(parts.cpu().numpy().view("uint64"), 50)
    assert got == _core.exact_wide_value(expected.numpy().view("uint64"), 50)


def test_counters_are_written_in_the_order_of_the_stream() -> None:
    import os

    fd = _core.create_counter_page()
    ours, agents = _core.CollectiveCounters(fd), _core.CollectiveCounters(fd)
    os.close(fd)
    first = ours.begin(0)
    ours.end_on_stream(0, first, 0, stream())
    torch.cuda.synchronize()
    assert agents.ended(0) == 1
    torch.cuda._sleep(200_000_000)
    ours.end_on_stream(0, ours.begin(0), 0, stream())
    assert (agents.begun(0), agents.ended(0)) == (2, 1)
    torch.cuda.synchronize()
    assert agents.ended(0) == 2


def test_a_mark_comes_when_what_was_begun_before_it_is_there() -> None:
    """What a chunk of the optimizer's step is to an heir."""
    header = _core.ArenaHeader(_core.create_arena(4096))
    header.format("a", 4096)
    for value in (3, 4):
        torch.cuda._sleep(400_000_000)
        header.open_step_on_stream(value, 0, stream())
    assert header.open_step == 0  # nobody waited
    torch.cuda.synchronize()
    assert header.open_step == 4
