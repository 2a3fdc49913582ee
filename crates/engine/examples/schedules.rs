//! What a program can ask of its scheduler: `cargo run -p belfry --example schedules`.

#![allow(clippy::print_stdout, reason = "it shows what it was answered")]

use belfry::{
    AgentBuilder, Engine, Expect, Resume, RunFilter, RunRequest, ScheduleDefinition, ScheduleFilter,
    StopOptions, When,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let agent = AgentBuilder::new("greeter").schedule("yearly", When::Cron("0 0 1 1 *".into())).build();
    let sleeper = AgentBuilder::new("sleeper").schedule("always", When::Cron("0 0 1 1 *".into())).build();
    let engine = Engine::builder()
        .handler("greeter", |run| async move {
            run.log("hello").await;
            Ok(())
        })
        .handler("sleeper", |_| std::future::pending())
        .agents([agent, sleeper])
        .build();
    engine.start().await?;

    // Makes another schedule, beside those of the program.
    let hourly = ScheduleDefinition::new(When::Cron("0 * * * *".into()));
    engine.put_schedule("greeter/hourly", &hourly, &Expect::Absent).await?;
    for schedule in engine.reads().schedules(&ScheduleFilter::default(), None, 10).await?.items {
        println!("{} {:?}", schedule.name, schedule.status);
    }

    // Pauses and resumes it. It says why it does not run.
    engine.pause("greeter/hourly", Some("on holiday"), None).await?;
    println!("{}", engine.why("greeter/hourly", None).await?.words);
    engine.resume("greeter/hourly", Resume::Skip).await?;

    // Makes a run now, and waits until it has ended.
    let made = engine.trigger("greeter/hourly", RunRequest::default()).await?;
    println!("run {} {:?}", made.run, engine.wait(made.run).await?.state);

    // Cancels one that would never end.
    let made = engine.trigger("sleeper/always", RunRequest::default()).await?;
    engine.cancel(made.run).await?;
    println!("run {} {:?}", made.run, engine.wait(made.run).await?.state);
    for run in engine.reads().runs(&RunFilter::default(), None, 10).await?.items {
        println!("{} {} {:?}", run.id, run.name, run.state);
    }
    Ok(engine.stop(StopOptions::default()).await?)
}
