"""A plan becomes the forward's inputs, with sampled tokens taken from the device."""

import pytest
import torch

from tidegate_kernels.apply_plan import SlotTables, apply_plan


def make_tables(device: torch.device) -> SlotTables:
    """Slot s: tokens s * 1000 + position, blocks 10 * s + index, block size 8."""
    slots = torch.arange(6, dtype=torch.int32)
    return SlotTables(
        token_ids=(slots[:, None] * 1000 + torch.arange(700, dtype=torch.int32)).to(device),
        known=torch.tensor([0, 20, 600, 9, 16, 5], dtype=torch.int32, device=device),
        last_token=(77_000 + slots).to(device),
        computed=torch.tensor([0, 12, 0, 9, 31, 0], dtype=torch.int32, device=device),
        block_table=(slots[:, None] * 100 + torch.arange(90, dtype=torch.int32)).to(device),
    )


def test_rows_become_inputs(device: torch.device) -> None:
    tables = make_tables(device)
    rows = [(2, 300), (1, 8), (4, 1), (3, 1)]  # slot, new tokens: chunk, rest of a prompt, two decodes
    starts = torch.tensor([0, 300, 308, 309, 310], dtype=torch.int32, device=device)
    slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int32, device=device)
    inputs = apply_plan(tables, slots, starts, num_tokens=310, width=38, block_size=8)

    tokens, positions, places = [], [], []
    for (slot, count), before in zip(rows, [0, 12, 31, 9], strict=True):
        for position in range(before, before + count):
            known = [0, 20, 600, 9, 16, 5][slot]
            tokens.append(slot * 1000 + position if position < known else 77_000 + slot)
            positions.append(position)
            places.append((slot * 100 + position // 8) * 8 + position % 8)
    assert inputs.input_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == places
    assert inputs.seq_lens.tolist() == [300, 20, 32, 10]
    assert tables.computed.tolist() == [0, 20, 300, 10, 32, 0]
    for row, (slot, used) in enumerate([(2, 38), (1, 3), (4, 4), (3, 2)]):
        expected = [slot * 100 + block for block in range(used)] + [0] * (38 - used)
        assert inputs.block_tables[row].tolist() == expected


def test_the_next_step_goes_on_where_this_one_ended(device: torch.device) -> None:
    tables = make_tables(device)
    slots = torch.tensor([5], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    apply_plan(tables, slots, starts, num_tokens=5, width=1, block_size=8)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    inputs = apply_plan(tables, slots, starts, num_tokens=1, width=1, block_size=8)
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([77_005], [5])


def test_a_width_beyond_the_table_is_refused(device: torch.device) -> None:
    tables = make_tables(device)
    slots = torch.tensor([5], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="width 91 must lie within 1 to 90"):
        apply_plan(tables, slots, torch.zeros(2, dtype=torch.int32, device=device), 0, 91, 8)
