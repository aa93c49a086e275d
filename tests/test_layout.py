import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rocm_mxfp8 import layout

ONE_BYTE = [
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]
shapes = st.tuples(
    st.integers(1, 6).map(lambda i: 16 * i), st.integers(1, 7).map(lambda i: 32 * i)
)


def random_bytes(
    n: int, k: int, dtype: torch.dtype = torch.uint8, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator).view(dtype)


def tile_offset(row: int, column: int) -> int:
    """Byte of a weight inside its 16 x 32 tile, written out from the description of the
    (16,16) shuffle: 16-byte halves of the columns, then rows, then bytes."""
    return (column // 16) * 256 + row * 16 + column % 16


@settings(deadline=None)
@given(shape=shapes, dtype=st.sampled_from(ONE_BYTE), seed=st.integers(0, 1000))
def test_shuffle_and_unshuffle_are_exact_inverses(shape, dtype, seed):
    weight = random_bytes(*shape, dtype=dtype, seed=seed)
    shuffled = layout.shuffle(weight)
    n, k = shape
    assert shuffled.shape == (n // 16, k // 32, 512)
    assert shuffled.dtype == dtype
    assert shuffled.is_contiguous()
    back = layout.unshuffle(shuffled)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))
    again = layout.shuffle(layout.unshuffle(shuffled))
    assert torch.equal(again.view(torch.uint8), shuffled.view(torch.uint8))


@settings(deadline=None, max_examples=20)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_every_byte_is_where_the_description_says(shape, seed):
    n, k = shape
    weight = random_bytes(n, k, seed=seed)
    shuffled = layout.shuffle(weight)
    for row in range(0, n, 5):
        for column in range(0, k, 7):
            tile = shuffled[row // 16, column // 32]
            assert tile[tile_offset(row % 16, column % 32)] == weight[row, column], (
                row,
                column,
            )


def test_same_bytes_as_aiters_published_permutation():
    weight = random_bytes(64, 96)
    n, k = weight.shape
    permuted = weight.view(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4).contiguous()
    assert torch.equal(layout.shuffle(weight).flatten(), permuted.flatten())


def test_strided_weights_shuffle_like_contiguous_ones():
    weight = random_bytes(64, 128)
    wide = torch.cat([weight, weight], dim=1)[:, :128]
    assert not wide.is_contiguous()
    assert torch.equal(layout.shuffle(wide), layout.shuffle(weight))
    assert torch.equal(layout.shuffle(weight.T.contiguous().T), layout.shuffle(weight))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(24, 32, dtype=torch.uint8), "N=24"),
        (torch.zeros(16, 48, dtype=torch.uint8), "K=48"),
        (torch.zeros(0, 32, dtype=torch.uint8), "N=0"),
        (torch.zeros(16, 32), "float32"),
        (torch.zeros(16, 32, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(1, 1, 512, dtype=torch.uint8), "already preshuffled"),
        (torch.zeros(512, dtype=torch.uint8), r"\(512,\)"),
    ],
)
def test_shuffle_names_what_is_wrong(weight, words):
    with pytest.raises(ValueError, match=words):
        layout.shuffle(weight)


@pytest.mark.parametrize("shape", [(16, 32), (1, 1, 256), (1, 1, 1, 512)])
def test_unshuffle_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="512"):
        layout.unshuffle(torch.zeros(shape, dtype=torch.uint8))


def expanded(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(32, dim=0)


def test_declared_and_equal_rows_give_blocks():
    blocks = random_bytes(3, 4)
    scale, confirmed = layout.block_scale(expanded(blocks), 32)
    assert confirmed
    assert torch.equal(scale, blocks)
    assert scale.is_contiguous()


@pytest.mark.parametrize("row", [0, 1, 31, 32, 63, 95])
@pytest.mark.parametrize("column", [0, 3])
def test_one_different_byte_anywhere_means_per_row(row, column):
    per_row = expanded(random_bytes(3, 4))
    per_row[row, column] ^= 1
    scale, confirmed = layout.block_scale(per_row, 32)
    assert not confirmed
    assert torch.equal(scale, per_row)


def test_uniform_data_does_not_become_blocks_unless_declared():
    uniform = torch.full((64, 4), 120, dtype=torch.uint8)
    scale, confirmed = layout.block_scale(uniform, 1)
    assert confirmed
    assert scale.shape == (64, 4)


def test_merged_parts_that_are_not_multiples_of_32_rows():
    """Two parts of 48 rows: the middle block holds rows of both."""
    parts = [expanded(random_bytes(2, 4, seed=s))[:48] for s in (1, 2)]
    scale, confirmed = layout.block_scale(torch.cat(parts), 32)
    assert not confirmed
    assert scale.shape == (96, 4)
    # 80 rows: no multiple of 32 at all.
    scale, confirmed = layout.block_scale(torch.cat(parts)[:80], 32)
    assert not confirmed
    assert scale.shape == (80, 4)
    # Parts of 64 and 32 rows: every block belongs to one part.
    whole = torch.cat(
        [expanded(random_bytes(2, 4, seed=3)), expanded(random_bytes(1, 4, seed=4))]
    )
    scale, confirmed = layout.block_scale(whole, 32)
    assert confirmed
    assert scale.shape == (3, 4)


@pytest.mark.parametrize(("shape", "block"), [((64, 4), "1x32"), ((2, 4), "32x32")])
def test_scale_block_is_read_from_the_shape(shape, block):
    assert layout.scale_block(torch.zeros(shape, dtype=torch.uint8), 64, 128) == block


@pytest.mark.parametrize("shape", [(64, 3), (3, 4), (256,), (4, 64)])
def test_scale_block_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"N=64 rows and K=128 columns.*\[64, 4\] or \[2, 4\]"):
        layout.scale_block(torch.zeros(shape, dtype=torch.uint8), 64, 128)
