"""The list that assay reads from SGLang's source."""

ATTENTION_BACKEND_CHOICES = ["torch_native", "triton", "flex_attention"]
