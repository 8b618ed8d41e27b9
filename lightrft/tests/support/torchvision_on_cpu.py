"""Imported first, before transformers: torchvision from the folder ``torchvision`` of the environment.

Its wheel is built for CUDA. Beside torch for CPUs its operators are missing, and transformers, which imports it where
it is installed, could not be imported either. So it is installed apart, and two operators are declared here that
nothing calls.
"""
import sys

import torch

OPERATORS = None
if torch.version.cuda is None:
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(f"{sys.prefix}/torchvision")
