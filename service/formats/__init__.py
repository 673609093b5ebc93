"""Readers of the formats that users upload, without torch: archives, ONNX, VNN-LIB and Llama-style configurations."""
