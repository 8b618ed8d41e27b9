# The PyPI wheels of torch contain the CUDA libraries. The host only needs the NVIDIA driver and the container toolkit.
FROM python:3.11-slim

RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/lightrft
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
ENTRYPOINT ["/bin/bash"]
