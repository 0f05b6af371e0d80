"""
Adapters made by PEFT, for test_adapters.c, which reads each, merges it, and writes it again. Needs torch,
transformers and peft; everything is made here and nothing is downloaded.

    python dev/ref/peft_adapters.py           build/peft/<name>/, a folder for each adapter of qwen_checks.py:
                                              base/, the model; adapter_config.json, adapter_model.safetensors;
                                              base.safetensors and merged.safetensors, the weights as transformers has
                                              them in memory, before and after merge_and_unload
    make test_adapters                      ... reads them, and writes <name>/ours/
    python dev/ref/peft_adapters.py --check   PEFT loads ours/: every A and B must be what it was
"""
import copy
import os
import shutil
import sys
import warnings

import exact
import lora
import qwen
import qwen_checks
import trainer

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "peft")


def folder_of(name):
    return os.path.normpath(os.path.join(FOLDER, "".join(c if c.isalnum() else "_" for c in name)))


def write_weights(folder, cfg, base, model):
    """base and merged, by the names of transformers' model"""
    weights = trainer.to_disk(qwen.MODEL, base, qwen_checks.in_memory(cfg))
    state = model.merge_and_unload().state_dict()
    merged = {key: state[key].float().numpy().copy() for key in weights}
    exact.write_safetensors(os.path.join(folder, "base.safetensors"), weights, {})
    exact.write_safetensors(os.path.join(folder, "merged.safetensors"), merged, {})


def make(truth, name, hf, settings):
    """An adapter of random values, saved by PEFT"""
    import peft
    folder, (cfg, base) = folder_of(name), qwen_checks.random_model(hf, 16)
    qwen.save(os.path.join(folder, "base"), cfg, base)
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **copy.deepcopy(settings)})
    model = peft.get_peft_model(truth.load(os.path.join(folder, "base")), config)
    with truth.torch.no_grad():
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    write_weights(folder, cfg, base, model)


def make_old(truth):
    """Two matrices for each expert and projection, as older versions have saved them; merged by PEFT"""
    import peft
    folder, (cfg, base) = folder_of("matrices of each expert"), qwen_checks.random_model(qwen_checks.EXPERT, 7)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3,
                "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    cut = [cut for place in lora.all_places(cfg) if place.n_experts for cut in lora.cut_places(place)]
    places = lora.with_ranks(lora.in_order(cfg, cut), settings)
    qwen.save(os.path.join(folder, "base"), cfg, base)
    lora.save(folder, lora.model_of(base, places, settings), cfg, lora.draw_adapter(cfg, places, 1.0))
    write_weights(folder, cfg, base, peft.PeftModel.from_pretrained(truth.load(os.path.join(folder, "base")), folder))


def is_read_back(truth, folder):
    """Does PEFT find in ours/ what it has found in its own files?"""
    import peft
    states = []
    for adapter in (folder, os.path.join(folder, "ours")):
        model = truth.load(os.path.join(folder, "base"))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")  # of which PEFT only warns
            model = peft.PeftModel.from_pretrained(model, adapter)
        states.append(peft.get_peft_model_state_dict(model))
    same = states[0].keys() == states[1].keys()
    return same and all(truth.torch.equal(x, states[1][key]) for key, x in states[0].items())


def main():
    truth = qwen_checks.Truth()
    if sys.argv[1:] == ["--check"]:
        names = [*qwen_checks.ADAPTERS, "matrices of each expert"]
        return exact.report([(f"{name}: PEFT reads what we wrote", is_read_back(truth, folder_of(name)))
                             for name in names])
    if sys.argv[1:]:
        raise SystemExit(f"usage: {sys.argv[0]} [--check]")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, (hf, settings) in qwen_checks.ADAPTERS.items():
        make(truth, name, hf, settings)
    make_old(truth)
    print(f"{os.path.normpath(FOLDER)}: {len(os.listdir(FOLDER))} adapters")
    return 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    sys.exit(main())
