//! Templates that try to grow, to nest, to loop, or to walk a large value again and again, and the values for them.

use belfry_core::template::SOURCE_MAX;
use serde_json::{Value, json};

/// What the templates refer to.
pub fn payload() -> Value {
    let mut deep = json!("end");
    for _ in 0..100 {
        deep = json!({"deep": deep, "0": [1, 2, 3]});
    }
    json!({
        "big": "x".repeat(1 << 20),
        "greek": "ΐ".repeat(1 << 19),
        "control": "\u{1}".repeat(1 << 19),
        "list": (0..100_000).map(|i| i.to_string()).collect::<Vec<_>>(),
        "deep": deep,
    })
}

/// The templates.
pub fn templates() -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let fill = |unit: &str| unit.repeat(SOURCE_MAX / unit.len());
    let signs = [
        "-",
        "+",
        "(",
        "[",
        "{",
        "{{",
        "{%",
        "{{{",
        "not ",
        "!",
        "~",
        "\"",
        "'",
        "\\",
        "|",
        "\u{202e}",
        "\0",
        ".",
        "%}",
        "}}",
        "{# ",
        "${",
        "é",
        "{{ (",
        "{{ [",
        "{% if ",
        "{% set x %}",
        "{%- ",
        "{{- ",
    ];
    for sign in signs {
        for count in [1, 2, 3, 10, 6_000, 10_000] {
            all.push(format!("{{{{ {}1 }}}}", sign.repeat(count)));
            all.push(sign.repeat(count));
        }
    }
    for filters in [
        "batch(2)",
        "format(9)",
        "indent(99999)",
        "slice(2)",
        "sort",
        "center(999999999)",
        "replace('a','bb')",
        "list",
        "safe",
    ] {
        all.push(format!("{{{{ payload.big | {filters} }}}}"));
        all.push(format!("{{% set x = payload.big | {filters} %}}{{{{ x }}}}"));
    }
    for filter in [
        "json",
        "upper",
        "lower",
        "trim",
        "join",
        "join('xxxxxxxx')",
        "length",
        "truncate(4294967295)",
        "first",
        "last",
        "date",
    ] {
        for path in [
            "payload",
            "payload.big",
            "payload.list",
            "payload.greek",
            "payload.control",
            "payload.deep",
            "prompt",
        ] {
            let chain = format!("|{filter}").repeat(SOURCE_MAX / (filter.len() + 2));
            all.push(match all.len() % 3 {
                0 => fill(&format!("{{{{ {path} | {filter} | truncate(1) }}}}")),
                1 => fill(&format!("{{{{ {path} | {filter} }}}}")),
                _ => format!("{{{{ {path}{chain} }}}}"),
            });
        }
    }
    for path in ["payload", "payload.big", "payload.list", "payload.deep", "prompt"] {
        all.push(fill(&format!("{{{{{path}}}}}")));
        all.push(fill(&format!("{{% if {path} == \"{}\" %}}x{{% endif %}}", "x".repeat(500))));
        all.push(fill(&format!("{{% if {path} %}}{{{{{path}}}}}{{% endif %}}")));
    }
    for depth in [1, 8, 9, 100, 400] {
        let open = "{% if payload.big %}".repeat(depth);
        all.push(format!("{open}{{{{ payload.big }}}}{}", "{% endif %}".repeat(depth)));
        all.push(open);
        all.push(format!(
            "{{% if payload.no %}}{}{{% endif %}}",
            "{% elif payload.no %}{{ payload }}".repeat(depth)
        ));
    }
    for length in [100, 16_300, SOURCE_MAX - 6, SOURCE_MAX + 1, 1 << 20] {
        all.push(format!("{{{{ \"{}\" }}}}", "x".repeat(length.saturating_sub(8))));
        all.push("x".repeat(length));
        all.push(format!("{{{{ payload{} }}}}", ".deep".repeat(length / 5)));
        all.push(format!("{{{{ payload{} }}}}", "[0]".repeat(length / 3)));
        all.push(format!("{{{{ payload.big | default(\"{}\") }}}}", "\\n".repeat(length / 2)));
    }
    for text in [
        "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
        "{% set x = 'x' %}{% for i in range(99) %}{% set x = x ~ x %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ range(99999999) | join }}",
        "{{ \"%999999999s\" | format('x') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ tick_at | date('%999999999Y') }}",
        "{{ tick_at | date('%:::::::z') }}",
        "{{ payload.__class__ }}",
        "{{ payload[payload] }}",
        "{% include 'x' %}",
    ] {
        all.push(text.to_owned());
    }
    all.push(fill("{{ tick_at|date('%F%F%F%F%F%F%F%F%F%F%F%F') }}"));
    all.push(format!("{{{{ tick_at | date('{}') }}}}", "%A".repeat(8_000)));
    all.push(fill("{{ attempt }}"));
    all
}
