from __future__ import annotations

import errno
import os

import pytest
import torch
from toy_models import CPU

from gsq_module.streaming import activations
from gsq_module.streaming.activations import ActivationStore, Stores, UnitSamples, choose_location
from gsq_module.streaming.staging import Staging

SHAPE = (7, 5, 16)


def filled(location, dtype, folder):
    store = ActivationStore(SHAPE, dtype, location, CPU, folder / "new" / "store.bin")
    generator = torch.Generator().manual_seed(0)
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
        store.write(rows, torch.randn(rows.stop - rows.start, *SHAPE[1:], generator=generator))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_memory_and_disk_give_the_same(dtype, tmp_path):
    memory, disk = (filled(location, dtype, tmp_path) for location in ("memory", "disk"))
    assert len(memory) == len(disk) == 7
    assert disk.nbytes == memory.nbytes == (tmp_path / "new" / "store.bin").stat().st_size
    for rows in (slice(2, 5), [6, 0, 3]):
        assert torch.equal(memory.read(rows, CPU, torch.float32), disk.read(rows, CPU, torch.float32))
    assert torch.equal(memory.data, disk.data)
    assert memory.data.dtype == dtype
    assert memory.read([0], CPU, torch.float32).dtype == torch.float32
    if dtype == torch.float32:
        assert torch.equal(memory.data[1:3], torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))[1:])


def test_file_left_by_a_killed_run_is_taken_over(tmp_path):
    file = tmp_path / "new" / "store.bin"
    file.parent.mkdir()
    file.write_bytes(b"\x7f" * 10_000)
    store = filled("disk", torch.float32, tmp_path)
    assert torch.equal(store.data, filled("memory", torch.float32, tmp_path).data)


def test_full_disk_is_noticed_before_it_is_written_to(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        assert length == 7 * 5 * 16 * 4
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"store\.bin needs .* GiB \(No space left on device\)"):
        filled("disk", torch.float32, tmp_path)
    assert not (tmp_path / "new" / "store.bin").exists()


def test_room_is_taken_at_once(tmp_path):
    """Not when it is written to: then there may be none left."""
    store = ActivationStore((256, 32, 64), torch.float32, "disk", CPU, tmp_path / "store.bin")
    assert (tmp_path / "store.bin").stat().st_blocks * 512 >= store.nbytes


def test_files_go_at_close(tmp_path):
    stores = Stores(SHAPE, torch.float32, "disk", CPU, tmp_path)
    stores["inputs"].write(slice(0, 7), torch.ones(SHAPE))
    stores["targets"].write(slice(0, 7), torch.zeros(SHAPE))
    assert stores["inputs"] is stores["inputs"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["inputs.bin", "targets.bin"]
    stores.close()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_was_never_asked_for_takes_no_room(tmp_path):
    Stores((1 << 40, 1, 1), torch.float32, "disk", CPU, tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_location_by_size(monkeypatch):
    monkeypatch.setattr(activations, "available_host_bytes", lambda: 1000)
    assert choose_location("auto", 500, None) == "memory"
    assert choose_location("auto", 501, None) == "disk"
    assert choose_location("auto", 400, 1000) == "device"
    assert choose_location("auto", 401, 1000) == "memory"
    assert choose_location("auto", 501, 1000) == "disk"
    for chosen in ("device", "memory", "disk"):
        assert choose_location(chosen, 1 << 60, 1000) == chosen


def test_free_memory_is_asked_of_a_device_that_has_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    assert activations.free_device_bytes(torch.device("cuda", 0)) == 1000
    assert activations.free_device_bytes(CPU) is None


def test_available_host_bytes_is_what_the_kernel_says():
    assert 1 << 20 < activations.available_host_bytes() < 1 << 50


def test_unit_samples_are_whole_batches_of_a_split(tmp_path):
    inputs, targets = (filled("memory", torch.float32, tmp_path) for _ in range(2))
    targets.write(slice(0, 7), torch.arange(7.0).view(7, 1, 1).expand(SHAPE))
    samples = UnitSamples([inputs, targets], range(4, 7), Staging(CPU))
    assert len(samples) == 3
    (given, wanted), (_, other) = samples.batches([[2, 0], [1]])
    assert torch.equal(given, inputs.data[[6, 4]])
    assert wanted[:, 0, 0].tolist() == [6.0, 4.0]
    assert other[:, 0, 0].tolist() == [5.0]


def test_unit_samples_do_not_keep_closed_stores(tmp_path):
    """The data module still has the samples of the last unit when the next pass over the model opens its stores."""
    store = filled("memory", torch.float32, tmp_path)
    samples = UnitSamples([store], range(4, 7), Staging(CPU))
    store.close()
    assert all(source.nbytes == 0 for source in samples.sources)
