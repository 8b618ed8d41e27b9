# The host needs the container toolkit and an NVIDIA driver for CUDA 13 (580 or newer).
# The toolkit of the base image is the one that torch in constraints/ is built with: DeepSpeed and kernels that are
# compiled at run time need it; Triton needs a C compiler and Python's headers; SGLang's kernels need libnuma.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG ENGINE=vllm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
       build-essential git libnuma1 make ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/lightrft
COPY constraints constraints
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -r constraints/${ENGINE}.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
ENTRYPOINT ["/bin/bash"]
