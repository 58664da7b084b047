"""Checkpoints: all that a run needs to go on at the exact step, saved behind training's back, whole or not at all.

    step-000040/
        .metadata, __0_0.distcp, …   torch DCP's shards of weights and AdamW's moments, as the ranks held them
        adapter/                     what PEFT and vLLM load, and what becomes a version (runs that learn an adapter)
        model.json                   which base the weights belong to
        position.json, ledger.json   where the run stands; the account of its rows
        manifest.json                size and SHA-256 of every file above
        COMMITTED                    SHA-256 of manifest.json; written last, it makes all the rest count

The learning rate and the random numbers are functions of the step and the seed, so the position restores them too.
Tensors are read into whatever layout asks for them: another world size, another strategy. The frozen base is in none.

`.metadata` is a pickle. It is opened by a run that goes on from its own files, or by an export of them, after its
digest was found to be the manifest's; never for a folder that somebody else hands over. What is registered and served
is `adapter/`, which is safetensors and JSON.

    saver      a worker's side: copy, commit in a thread, resume        storage    a folder or s3://
    shards     staging buffers, DCP out and in                          manifest   what is there, what counts, why not
    aftermath  telling the registry, deleting old ones                  retention  which are old
    export     Hugging Face and PEFT folders

`manifest`, `storage` and `retention` are read without torch.
"""
