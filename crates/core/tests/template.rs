//! The template language: what it takes, what it gives, and that nothing makes it grow or hang.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Instant;

use belfry_core::template::{Budget, LINE_MAX, Part, RESULT_MAX, Template, Values, WORK_MAX, check_line};
use belfry_time::Zone;
use serde_json::{Value, json};

mod hostile;

fn render_with(source: &str, payload: &Value, budget: &mut Budget) -> Result<String, String> {
    let zone = Zone::get("Europe/London").unwrap();
    let values = Values {
        prompt: Some("Go."),
        payload,
        command: "poll",
        agent: "a",
        schedule: "s",
        session: None,
        run: "0199",
        attempt: 2,
        tick_at: Some("2026-07-01T08:30:00Z".parse().unwrap()),
        last_success_at: None,
        zone: &zone,
    };
    let template = Template::parse(source).map_err(|error| error.to_string())?;
    template.render(&values, budget).map_err(|error| error.to_string())
}

fn payload() -> Value {
    json!({
        "ref": "main", "n": 3, "zero": 0, "half": 0.5, "yes": true, "no": false, "empty": "", "nothing": null,
        "list": ["b", 1, null, {"x": "deep"}], "none": [], "map": {"k": "v", "a-b": 1, "two words": 2, "0": "zero"},
        "blank": "  x \n", "greek": "ΑΒΓδ", "at": "2026-01-31T23:30:00Z", "code": "{{ prompt }} {% if %} ${HOME}",
    })
}

fn given(source: &str) -> Result<String, String> {
    render_with(source, &payload(), &mut Budget::default())
}

#[test]
fn values_stand_where_their_paths_stand() {
    for (source, expected) in [
        ("", ""),
        ("no template { } }} %} {# x #}", "no template { } }} %} {# x #}"),
        ("Handle {{ payload.ref }}, {{payload.n}}.\n", "Handle main, 3.\n"),
        (
            "{{ prompt }}|{{ command }}|{{ agent }}/{{ schedule }}|{{ run }}|{{ attempt }}",
            "Go.|poll|a/s|0199|2",
        ),
        ("{{ tick_at }}", "2026-07-01T08:30:00Z"),
        ("{{ payload.half }} {{ payload.yes }} {{ payload.zero }}[{{ payload.empty }}]", "0.5 true 0[]"),
        ("{{ payload.list }}", r#"["b",1,null,{"x":"deep"}]"#),
        ("{{ payload.list[0] }}{{ payload.list.1 }}{{ payload.list[3].x }}", "b1deep"),
        (
            "{{ payload.map.a-b }}{{ payload.map[\"two words\"] }}{{ payload[ 'map' ].k }}{{ payload.map.0 }}",
            "12vzero",
        ),
        ("{{ \"{{\" }} {{ '{%' }} {{ \"}}\" }}", "{{ {% }}"),
        (r#"{{ "a\"b\\\n\t'" }}"#, "a\"b\\\n\t'"),
        ("{{ 'it\"s' }}", "it\"s"),
        ("{{ payload.code }}", "{{ prompt }} {% if %} ${HOME}"),
        ("{{\n  payload.ref\n}}", "main"),
        ("ü{{ payload.greek }}ü", "üΑΒΓδü"),
        (
            "{{{ \"x\" }}}",
            "ERROR expected a path such as `payload.x`, or a text in quotes, got `{ \"x\" }}}`; for the \
          text `{{` write `{{ \"{{\" }}`",
        ),
    ] {
        let got = given(source).unwrap_or_else(|error| format!("ERROR {error}"));
        assert_eq!(got, expected, "{source}");
    }
}

#[test]
fn filters_change_values() {
    for (source, expected) in [
        ("{{ payload.nope | default(\"main\") }}", "main"),
        ("{{ payload.nothing | default('x') }}{{ payload.nope.deep[1] | default(5) }}", "x5"),
        ("{{ payload.empty | default('x') }}", ""),
        ("{{ payload.nope | upper | default('x') }}{{ payload.none | first | default('y') }}", "xy"),
        (
            "{{ last_success_at | default('never') }} {{ session | default('-') }} {{ item.id | default('-') }}",
            "never - -",
        ),
        (
            "{{ payload.ref | json }}{{ payload.nothing | json }}{{ payload.map.k | json }}",
            "\"main\"null\"v\"",
        ),
        (
            "{{ payload.list | join }}; {{ payload.list | join('/') }}",
            "b, 1, null, {\"x\":\"deep\"}; b/1/null/{\"x\":\"deep\"}",
        ),
        ("{{ payload.greek | lower }}{{ payload.greek|upper }}{{ payload.yes | upper }}", "αβγδΑΒΓΔTRUE"),
        ("[{{ payload.blank | trim }}]", "[x]"),
        (
            "{{ payload.greek | truncate(2) }}{{ payload.ref | truncate(0) }}{{ payload.ref | truncate(99) }}",
            "ΑΒmain",
        ),
        (
            "{{ payload.list | first }}{{ payload.list | last }}{{ payload.ref | first }}{{ payload.ref | last }}",
            "b{\"x\":\"deep\"}mn",
        ),
        (
            "{{ payload.list | length }} {{ payload.map | length }} {{ payload.greek | length }} {{ payload.n | length }}",
            "4 4 4 1",
        ),
        ("{{ tick_at | date }} {{ payload.at | date }}", "2026-07-01 2026-01-31"),
        (
            "{{ tick_at | date('%H:%M') }} {{ tick_at | date('%d.%m.%y %H:%M %z', 'Asia/Tokyo') }}",
            "09:30 01.07.26 17:30 +0900",
        ),
        ("{{ \" a \" | trim | upper | json }}", "\"A\""),
    ] {
        let got = given(source).unwrap_or_else(|error| format!("ERROR {error}"));
        assert_eq!(got, expected, "{source}");
    }
}

#[test]
fn a_letter_changes_its_case_whatever_stands_around_it() {
    let payload = json!({"name": "ΟΔΟΣ ΣΑΣ İX straße ﬃ ŉ ΐ"});
    let given = |source| render_with(source, &payload, &mut Budget::default());
    assert_eq!(given("{{ payload.name | lower }}").unwrap(), "οδοσ σασ i\u{307}x straße ﬃ ŉ ΐ");
    assert_eq!(given("{{ payload.name | upper }}").unwrap(), "ΟΔΟΣ ΣΑΣ İX STRASSE FFI ʼN Ι\u{308}\u{301}");
}

/// What takes long for its length costs more. The numbers are what one character or item takes at least, in bytes of
/// work: a budget of 32 MiB is then used up after so many of them that all take less than a tenth of a second.
#[test]
fn what_takes_longer_per_byte_costs_more() {
    const COUNT: usize = 20_000;
    let letters = |letter: &str| json!({"x": letter.repeat(COUNT)});
    let items = |item: Value| json!({"x": vec![item; COUNT]});
    for (filter, payload, least) in [
        ("lower", letters("Σ"), 20),
        ("lower", letters("Σ'"), 20),
        ("lower", letters("A"), 2),
        ("upper", letters("ΐ"), 20),
        ("upper", letters("ŉ"), 20),
        ("trim", letters("\u{2003}"), 6),
        ("length", letters("é"), 4),
        ("truncate(9)", letters("é"), 4),
        ("json", letters("\u{1}"), 16),
        ("json", items(json!(0.5)), 16),
        ("json", items(json!({})), 16),
        ("join('')", items(json!("")), 16),
        ("join('')", items(json!(0.5)), 32),
        ("join('')", items(json!({"a": []})), 64),
    ] {
        let mut budget = Budget::default();
        render_with(&format!("{{{{ payload.x | {filter} | default('') }}}}"), &payload, &mut budget).unwrap();
        let each = budget.used() as usize / COUNT;
        assert!(each >= least, "{filter} of {:.40}: {each}", payload["x"]);
    }
    let sigmas = json!({"x": "Σ".repeat(450_000)});
    let many = "{{ payload.x | lower | length }}".repeat(100);
    let stopped = render_with(&many, &sigmas, &mut Budget::default()).unwrap_err();
    assert!(stopped.contains("more than 32 MiB of work"), "{stopped}");
}

#[test]
fn conditions_choose_a_branch_and_line_ends_stay() {
    let truths = [
        ("ref", true),
        ("n", true),
        ("zero", false),
        ("half", true),
        ("yes", true),
        ("no", false),
        ("empty", false),
        ("nothing", false),
        ("nope", false),
        ("nope.deep", false),
        ("list", true),
        ("none", false),
        ("map", true),
    ];
    for (key, truth) in truths {
        let source =
            format!("{{% if payload.{key} %}}y{{% endif %}}{{% if not payload.{key} %}}n{{% endif %}}");
        assert_eq!(given(&source).unwrap(), if truth { "y" } else { "n" }, "{key}");
    }
    for (condition, truth) in [
        ("payload.ref == \"main\"", true),
        ("payload.ref != 'main'", false),
        ("payload.n == \"3\"", true),
        ("payload.yes == 'true'", true),
        ("payload.nope == \"\"", false),
        ("payload.nope != \"x\"", true),
        ("payload.list == \"[]\"", false),
        ("attempt == \"2\"", true),
        ("not payload.no", true),
    ] {
        let source = format!("{{% if {condition} %}}y{{% else %}}n{{% endif %}}");
        assert_eq!(given(&source).unwrap(), if truth { "y" } else { "n" }, "{condition}");
    }
    let chain =
        "{% if payload.no %}1{% elif payload.n == '3' %}2{% elif payload.yes %}3{% else %}4{% endif %}";
    assert_eq!(given(chain).unwrap(), "2");
    assert_eq!(given("a\r\n{% if payload.yes %}\n\tb\n{% endif %}\n").unwrap(), "a\r\n\n\tb\n\n");
    assert_eq!(
        given("{% if payload.no %}{{ payload.nope }}{% endif %}").unwrap(),
        "",
        "what is not chosen is not read"
    );
}

#[test]
fn what_is_wrong_is_said_with_its_place_and_the_way_out() {
    for (source, place, message) in [
        ("a {{ payloda.x }}", "payloda", "unknown name `payloda`; did you mean `payload`?"),
        (
            "{{ env.HOME }}",
            "env",
            "unknown name `env`; known names are prompt, payload, item, command, agent, schedule, \
          session, run, attempt, tick_at, last_success_at",
        ),
        ("{{ payload.x | uper }}", "uper", "unknown filter `uper`; did you mean `upper`?"),
        (
            "{{ payload.x | batch(3) }}",
            "batch",
            "unknown filter `batch`; known filters are default, json, join, lower, \
          upper, trim, truncate, first, last, length, date",
        ),
        ("{{ payload.x | truncate }}", "truncate ", "`truncate` is written `truncate(80)`"),
        ("{{ payload.x | upper(1) }}", "upper(1)", "`upper` is written without arguments"),
        (
            "{{ tick_at | date('%9Y') }}",
            "date('%9Y')",
            "unknown sign in the format of `date`; known are %Y %m %d %H %M %S %y \
          %j %a %A %b %B %e %I %p %z %F %T %s %f %%",
        ),
        ("x {{ payload.x", "{{ payload.x", "`{{` without a `}}`; for the text `{{` write `{{ \"{{\" }}`"),
        ("{{ payload.n + 1 }}", "+", "expected `|` or `}}`, got `+ 1 }}`"),
        (
            "{{ -1 }}",
            "-",
            "expected a path such as `payload.x`, or a text in quotes, got `-1 }}`; for the text `{{` write \
          `{{ \"{{\" }}`",
        ),
        (
            "{% for x in payload.list %}",
            "f",
            "expected `if`, `elif`, `else` or `endif` after `{%`, got \
          `for x in payload.lis…`; for the text `{%` write `{{ \"{%\" }}`",
        ),
        ("{% if payload.x %}", "{% if payload.x %}", "this `if` has no `{% endif %}`"),
        ("{% endif %}", "endif", "`endif` without an `if` before it"),
        ("{% if payload.x %}{% else %}{% else %}{% endif %}", "else", "`else` after `else`"),
        ("{% if not payload.x == 'y' %}", "not", "`not` stands before a path alone; write `!=`"),
        ("{% if payload.x == y %}", "y", "expected a text in quotes, got `y %}`"),
        ("{{ 'x }}", "'x }}", "a text that begins with `'` does not end"),
        (
            "{{ payload..x }}",
            ".",
            "expected a key after `.`, got `.x }}`; any key can be written `[\"key\"]`",
        ),
    ] {
        let error = Template::parse(source).expect_err(source);
        assert_eq!(error.to_string(), message, "{source}");
        assert_eq!(&source[error.range.clone()], place, "{source}");
    }
    let error = Template::parse_prompt("Again: {{ prompt }}").unwrap_err();
    assert_eq!(error.to_string(), "a prompt cannot refer to `prompt`");
}

#[test]
fn what_is_missing_or_of_another_kind_is_an_error_that_names_it() {
    for (source, message) in [
        (
            "{{ payload.nope.deep }}",
            "`payload.nope.deep` is missing; `{{ payload.nope.deep | default(\"…\") }}` would stand in for it",
        ),
        (
            "{{ payload.nothing | upper }}",
            "`payload.nothing` is missing; `{{ payload.nothing | default(\"…\") }}` would stand in for it",
        ),
        (
            "{{ payload.ref.x }}",
            "`payload.ref.x` is missing; `{{ payload.ref.x | default(\"…\") }}` would stand in for it",
        ),
        ("{{ session }}", "`session` is missing; `{{ session | default(\"…\") }}` would stand in for it"),
        ("{{ payload.list | upper }}", "`upper` needs text, got a list"),
        ("{{ payload.map | join }}", "`join` needs a list, got a map"),
        ("{{ payload.ref | join }}", "`join` needs a list, got text"),
        ("{{ payload.ref | date }}", "`date` needs an instant, got text"),
    ] {
        assert_eq!(given(source).unwrap_err(), message);
    }
}

#[test]
fn text_of_the_template_and_values_can_be_told_apart() {
    let (zone, payload) = (Zone::utc(), json!({"x": "${B}"}));
    let values = Values {
        prompt: None,
        payload: &payload,
        command: "poll",
        agent: "a",
        schedule: "s",
        session: None,
        run: "1",
        attempt: 1,
        tick_at: None,
        last_success_at: None,
        zone: &zone,
    };
    let source = "${A}{{ payload.x }}{% if payload.x %}c{{ \"${\" }}{% endif %}";
    let template = Template::parse(source).unwrap();
    let mut parts = Vec::new();
    let mut keep = |part: Part<'_>| {
        parts.push(match part {
            Part::Text(text) => format!("text {text}"),
            Part::Value(value) => format!("value {value}"),
        });
    };
    template.render_parts(&values, &mut Budget::default(), &mut keep).unwrap();
    assert_eq!(parts, ["text ${A}", "value ${B}", "text c", "value ${"]);
    let texts: Vec<_> = template.texts().into_iter().map(|(text, range)| (text, &source[range])).collect();
    assert_eq!(texts, [("${A}", "${A}"), ("c", "c")]);
}

#[test]
fn a_shell_line_with_a_value_is_refused_with_the_line_that_works() {
    for (line, expected) in [
        (
            "find {{ payload.dir }} -name x",
            "write `env: {DIR: \"{{ payload.dir }}\"}` and `shell: find \"$DIR\" -name x`",
        ),
        (
            "echo \"says {{prompt}}!\"",
            "write `env: {PROMPT: \"{{ prompt }}\"}` and `shell: echo \"says ${PROMPT}!\"`",
        ),
        (
            "ls {{ payload.path | default(\".\") }}",
            "write `env: {PAYLOAD_PATH: \"{{ payload.path | default('.') }}\"}` and \
          `shell: ls \"$PAYLOAD_PATH\"`",
        ),
        (
            "cp {{ payload.a.x }} {{ payload.b.x }} {{ payload.a.x }}",
            "write `env: {X: \"{{ payload.a.x }}\", X_2: \"{{ payload.b.x }}\"}` \
          and `shell: cp \"$X\" \"$X_2\" \"$X\"`",
        ),
        (
            "echo '{{ payload.x }}'",
            "write `env: {X: \"{{ payload.x }}\"}`, and `\"$X\"`, in double quotes, where the value belongs",
        ),
        ("echo {{{ item.id }}}", "write `env: {ID: \"{{ item.id }}\"}` and `shell: echo {\"$ID\"}`"),
        ("echo {{ payload.x", "write `env: {X: \"{{ payload.x }}\"}` and `shell: echo \"$X\"`"),
    ] {
        let error = check_line(line).expect_err(line);
        assert_eq!(error.message, "a `shell` line is not a template: values come as environment variables");
        let help = error.help.unwrap();
        assert_eq!(help, expected, "{line}");
        assert!(line[error.range].starts_with("{{"), "{line}");
    }
    for line in [
        "docker ps --format '{{.Names}}'",
        "docker inspect -f '{{ json .State }} {{ .run }} {{.payload.x}}'",
        "echo {{ }} {{",
        "awk '{{print $1}}'",
        "echo {{payloads}} {{ prompt_x }} {{ schedules.x }}",
        "gh api --template '{{range .}}{{.title}}{{end}}'",
        "echo ${x} {% if payload.x %} {{- payload.x }}",
    ] {
        assert_eq!(check_line(line), Ok(()), "{line}");
    }
}

#[test]
fn a_long_shell_line_is_refused_in_few_words() {
    let fill = |unit: &str| unit.repeat(LINE_MAX / unit.len());
    let different: String = (0..).map(|n| format!("{{{{run.a{n}}}}}")).take(4_000).collect();
    for line in [
        fill("{{run "),
        fill("{{run}}"),
        fill("{{ run.x }} "),
        different,
        "{{run.a}} ".repeat(9),
        format!("{{{{run.{}}}}}", "a".repeat(1_000)),
        format!("{{{{run{}", "ä".repeat(LINE_MAX / 2 - 10)),
    ] {
        assert!(line.len() <= LINE_MAX);
        let error = check_line(&line).unwrap_err();
        assert_eq!(error.message, "a `shell` line is not a template: values come as environment variables");
        let help = error.help.unwrap();
        assert!(help.starts_with("write `env: {NAME: \"{{ payload.name }}\"}`, and `\"$NAME\"`"), "{help}");
    }
    let eight: String = (1..=8).map(|n| format!("{{{{run.a{n}}}}} ")).collect();
    let help = check_line(&eight).unwrap_err().help.unwrap();
    assert!(help.contains("A8: \"{{ run.a8 }}\"") && help.contains("shell: \"$A1\" \"$A2\""), "{help}");

    assert_eq!(check_line(&"x".repeat(LINE_MAX)), Ok(()));
    for line in ["x".repeat(LINE_MAX + 1), "{{run ".repeat(100_000)] {
        let error = check_line(&line).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "a `shell` line has at most 65536 bytes, this one has {}; put the text into a file, and run that",
                line.len()
            )
        );
    }
}

#[test]
fn whatever_a_template_says_it_is_refused_or_its_work_is_bounded() {
    let payload = hostile::payload();
    let all = hostile::templates();
    assert!(all.len() >= 200, "{}", all.len());
    let (mut refused, mut stopped, mut done, mut slowest) = (0, 0, 0, (0, String::new()));
    for source in &all {
        let began = Instant::now();
        let mut budget = Budget::default();
        match render_with(source, &payload, &mut budget) {
            Ok(result) => {
                done += 1;
                assert!(result.len() <= RESULT_MAX);
                assert!(budget.used() <= WORK_MAX);
            }
            Err(_) if budget.used() == 0 => refused += 1,
            Err(_) => stopped += 1,
        }
        // The step that oversteps the budget is at most as large as the largest value, read once.
        assert!(
            budget.used() <= WORK_MAX + (16 << 20),
            "{} {}",
            budget.used(),
            &source[..source.len().min(80)]
        );
        let took = began.elapsed().as_millis();
        if took > slowest.0 {
            slowest = (took, source.chars().take(60).collect());
        }
    }
    println!(
        "{} templates: {refused} refused, {stopped} stopped, {done} done; slowest {slowest:?} ms",
        all.len()
    );
    assert!(refused > 100 && stopped > 20 && done > 20, "{refused} {stopped} {done}");
}
