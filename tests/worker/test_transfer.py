"""Columns arrive on the device as they were, by one copy."""

import torch

from worker_service.transfer import pack, to_device, unpack

COLUMNS = [
    torch.arange(5, dtype=torch.int32),
    torch.tensor([2**40, -1]),
    torch.zeros(0, dtype=torch.int64),
    torch.arange(6, dtype=torch.int32).view(2, 3),
    torch.tensor([0.5, -2.0]),
]


def test_columns_come_back_with_their_types_shapes_and_values():
    arrived = unpack(pack(COLUMNS).clone(), COLUMNS)
    for sent, got in zip(COLUMNS, arrived, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got, sent)


def test_each_column_is_aligned():
    packed = pack(COLUMNS)
    assert {(view.data_ptr() - packed.data_ptr()) % 16 for view in unpack(packed, COLUMNS)} == {0}


def test_another_device_gets_one_buffer():
    on_device = to_device(COLUMNS, torch.device("meta"))
    assert {column.device.type for column in on_device} == {"meta"}
    assert len({column.untyped_storage()._cdata for column in on_device}) == 1


def test_a_cpu_gets_the_columns_themselves():
    assert all(a is b for a, b in zip(to_device(COLUMNS, torch.device("cpu")), COLUMNS, strict=True))
