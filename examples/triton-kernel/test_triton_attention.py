"""The Triton kernel against assay's oracle; interpreted where there is no GPU."""


def test_forward_is_correct(assay):
    assay.check("triton_attention:forward")
