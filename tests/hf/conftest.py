import pytest

pytest.importorskip("transformers")

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
