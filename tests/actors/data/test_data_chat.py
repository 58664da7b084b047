"""The loss mask, under chat templates of several families, with a real tokenizer."""

from collections.abc import Callable
from typing import Any

import pytest

from actors.data.chat import RenderError, load_tokenizer, render, show_mask
from actors.data.rows import Message
from cluster.errors import ConfigError

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
NO_END_TOKEN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = "{{ raise_exception('no system here') if messages[0]['role'] == 'system' }}" + CHATML

CONVERSATION = [
    Message(role="system", content="Name it."),
    Message(role="user", content="first question"),
    Message(role="assistant", content="one"),
    Message(role="user", content="second question"),
    Message(role="assistant", content="two words"),
]


@pytest.fixture(scope="module")
def tokenizer_with() -> Callable[[str], Any]:
    """A byte-level BPE tokenizer with special tokens and the given template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([LLAMA2, CHATML, "assistant user system question"], trainer)

    def make(template: str) -> Any:
        made = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=special, eos_token="<|im_end|>")
        made.chat_template = template
        return made

    return make


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (
            CHATML,
            "<|im_start|>system\nName it.<|im_end|>\n<|im_start|>user\nfirst question<|im_end|>\n"
            "<|im_start|>assistant\n⟦one<|im_end|>⟧\n<|im_start|>user\nsecond question<|im_end|>\n"
            "<|im_start|>assistant\n⟦two words<|im_end|>⟧\n",
        ),
        (LLAMA2, "<s>[INST] first question [/INST]⟦ one </s>⟧<s>[INST] second question [/INST]⟦ two words </s>⟧"),
        (
            NO_END_TOKEN,
            "system: Name it.\nuser: first question\n⟦assistant: one\n⟧user: second question\n⟦assistant: two words\n⟧",
        ),
    ],
    ids=["chatml", "llama2", "no end token"],
)
def test_loss_is_on_every_answer_and_the_token_that_ends_it(
    tokenizer_with: Callable[[str], Any], template: str, shown: str
) -> None:
    tokenizer = tokenizer_with(template)
    assert show_mask(tokenizer, CONVERSATION) == shown
    rendered = render(tokenizer, CONVERSATION)
    assert rendered.input_ids == tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    # What a server sends before the last answer must be what stands before the last learned span.
    prompt = tokenizer.apply_chat_template(CONVERSATION[:-1], return_dict=False, add_generation_prompt=True)
    assert rendered.input_ids[: len(prompt)] == prompt
    assert not rendered.loss_mask[len(prompt) - 1]
    assert rendered.loss_mask[len(prompt)]


def test_a_template_that_puts_in_a_system_message_of_its_own(tokenizer_with: Callable[[str], Any]) -> None:
    shown = show_mask(tokenizer_with(CHATML), CONVERSATION[1:3])
    assert shown.startswith("<|im_start|>system\nBe kind.")
    assert shown.endswith("assistant\n⟦one<|im_end|>⟧\n")


def test_where_earlier_turns_change_the_templates_own_marks_are_used(tokenizer_with: Callable[[str], Any]) -> None:
    messages = [
        *CONVERSATION[:2],
        Message(role="assistant", content="<think>hm</think>one"),
        *CONVERSATION[3:],
    ]
    shown = show_mask(tokenizer_with(FORGETS_THOUGHTS), messages)
    assert shown.count("⟦one<|im_end|>⟧\n") == 1
    assert shown.count("⟦two words<|im_end|>⟧\n") == 1
    assert shown.count("⟦") == 2


def test_without_marks_such_a_conversation_is_refused(tokenizer_with: Callable[[str], Any]) -> None:
    bare = FORGETS_THOUGHTS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    messages = [*CONVERSATION[:2], Message(role="assistant", content="<think>hm</think>one"), *CONVERSATION[3:]]
    with pytest.raises(RenderError) as caught:
        render(tokenizer_with(bare), messages)
    assert caught.value.reason == "template-not-prefix-stable"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (REFUSES_SYSTEM, CONVERSATION, "template-error"),
        (CHATML, CONVERSATION[:2], "no-answer"),
        (LLAMA2.replace(" {{ m['content'] }} </s>", ""), CONVERSATION[:3], "empty-answer"),
    ],
)
def test_what_cannot_be_masked_says_why(
    tokenizer_with: Callable[[str], Any], template: str, messages: list[Message], reason: str
) -> None:
    with pytest.raises(RenderError) as caught:
        render(tokenizer_with(template), messages)
    assert caught.value.reason == reason


@pytest.mark.integration
def test_a_folder_without_tokenizer_or_template_is_the_users_to_mend(
    tokenizer_with: Callable[[str], Any], tmp_path: Any
) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    plain = tokenizer_with(CHATML)
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(tmp_path)
