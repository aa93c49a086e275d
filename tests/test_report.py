import json
import logging

import pytest

from vllm_rocm_mxfp8 import report
from vllm_rocm_mxfp8.report import Row


def rows():
    ours = [
        Row(f"layers.{i}.wq_b", 8192, 1280, "32x32", "AiterMxfp8LinearKernel", True, "FlyDSL")
        for i in range(3)
    ]
    ours.append(
        Row("layers.0.wo_b", 5120, 2048, "32x32", "AiterMxfp8LinearKernel", True, "FlyDSL")
    )
    left = [
        Row(
            f"layers.{i}.wo_a", 64, 128, "1x32", "AiterMxfp8LinearKernel", False,
            "vLLM's Triton", "read_elsewhere", "wo_a read outside the linear",
        )
        for i in range(2)
    ]  # fmt: skip
    return ours + left


def test_summary_counts_linears_shapes_and_reasons():
    assert report.summary(rows()) == (
        "4 of 6 MXFP8 linears on FlyDSL (2 shapes); "
        "2 on vLLM's Triton: wo_a read outside the linear (2)"
    )
    assert report.summary(rows()[:1]) == "1 of 1 MXFP8 linears on FlyDSL (1 shape)"
    assert report.summary(rows()[4:]) == (
        "0 of 2 MXFP8 linears; 2 on vLLM's Triton: wo_a read outside the linear (2)"
    )


def test_summary_stays_one_line_with_many_reasons():
    many = [
        Row(f"l{i}", 8 + i, 32, "", "K", False, "elsewhere", "n_tile", f"N={8 + i} is odd")
        for i in range(9)
    ]
    text = report.summary(many)
    assert "5 more reasons" in text
    assert "\n" not in text


def test_table_has_a_line_per_linear_in_columns():
    lines = report.table(rows()).splitlines()
    assert len(lines) == 8
    assert lines[0].split()[:4] == ["layer", "N", "K", "block"]
    assert "wo_a read outside the linear" in lines[-1]
    assert lines[2].index("FlyDSL") == lines[5].index("FlyDSL") == lines[0].index("runs on")


def test_json_one_file_per_rank(tmp_path):
    path = tmp_path / "new" / "report.json"
    for rank in (0, 1):
        written = report.write(path, rank, rows(), {"active": True})
        assert written.name == f"report.rank{rank}.json"
        content = json.loads(written.read_text())
        assert content["rank"] == rank
        assert content["active"] is True
        assert content["summary"] == report.summary(rows())
        assert [Row(**r) for r in content["layers"]] == rows()
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "report.rank0.json",
        "report.rank1.json",
    ]
    assert report.rank_path(tmp_path / "plain", 3).name == "plain.rank3.json"


def test_an_unwritable_report_is_an_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        report.write(tmp_path / "file" / "report.json", 0, rows(), {})


def test_log_lines_have_the_prefix_and_vllms_logger():
    from vllm_rocm_mxfp8.log import logger

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    parent = logging.getLogger("vllm")
    parent.addHandler(handler)
    try:
        logger.warning("%d layers", 3)
    finally:
        parent.removeHandler(handler)
    assert [r.getMessage() for r in records] == ["[rocm-mxfp8] 3 layers"]
