package config

import "time"

type rawGroup struct {
	Name   userName      `yaml:"name" need:"a name for it" doc:"Name of the group."`
	Limits rawUserLimits `yaml:"limits" doc:"Limits of each member, which has allowances of its own; of a user's and its group's limit the smaller holds."`
}

type rawUser struct {
	Name       userName      `yaml:"name" need:"a name for it" doc:"Name of the user; not all digits."`
	ID         userID        `yaml:"id" doc:"Durable number; without it one is assigned."`
	Group      userName      `yaml:"group" doc:"Group of which it is a member."`
	Enabled    bool          `yaml:"enabled" default:"true" doc:"Whether the user may do anything."`
	Notes      string        `yaml:"notes" doc:"Anything."`
	ExternalID string        `yaml:"external_id" doc:"Name in another system."`
	Limits     rawUserLimits `yaml:"limits" doc:"Limits; 0 is unlimited."`
	Expires    rawExpires    `yaml:"expires" doc:"When its time is up: the earlier of the two; never without them."`
	Devices    []deviceSet   `yaml:"devices" doc:"Devices whose traffic is the user's: mac:ADDRESS, host:NAME, an address or a prefix."`
}

type rawUserLimits struct {
	Traffic       rawTraffic    `yaml:"traffic" doc:"Payload bytes in a period, times the multiplier."`
	Multiplier    multiplier    `yaml:"multiplier" doc:"Factor of what is charged, 0 to 1000 with at most six decimals; 1 without it."`
	Speed         Rate          `yaml:"speed" doc:"Of both directions together."`
	Bandwidth     rawBandwidth  `yaml:"bandwidth" doc:"Of each direction."`
	Connections   int           `yaml:"connections" doc:"Live flows at once, dials in progress included."`
	IPs           int           `yaml:"ips" doc:"Source addresses at once."`
	WhenExhausted *rawExhausted `yaml:"when_exhausted" word:"block" doc:"What happens when the traffic is used up: block, which is the default, a throttle or an outbound."`
}

type rawTraffic struct {
	Up    Size     `yaml:"up" doc:"Upward."`
	Down  Size     `yaml:"down" doc:"Downward."`
	Total Size     `yaml:"total" doc:"Both together."`
	Reset rawReset `yaml:"reset" doc:"When the period begins anew; never without it."`
}

type rawReset struct {
	Every     string `yaml:"every" enum:"hour|day|week|month" need:"every: hour, day, week or month" doc:"Length of the period; a week begins on Monday."`
	Day       int    `yaml:"day" default:"1" min:"1" max:"31" doc:"Day on which a month begins; in a shorter month the last."`
	Zone      string `yaml:"zone" doc:"Time zone, as in Europe/Berlin; UTC without it."`
	CarryOver bool   `yaml:"carry_over" doc:"What is left is added to the next period, once."`
}

type rawBandwidth struct {
	Up   Rate `yaml:"up" doc:"Upward."`
	Down Rate `yaml:"down" doc:"Downward."`
}

type rawExhausted struct {
	Throttle Rate    `yaml:"throttle" doc:"Go on this slowly, both directions together."`
	Outbound tagName `yaml:"outbound" doc:"Outbound that new flows are sent to."`
}

type rawExpires struct {
	At            instant       `yaml:"at" doc:"Time, RFC 3339, as in 2027-01-31T00:00:00+01:00."`
	AfterFirstUse time.Duration `yaml:"after_first_use" doc:"Time from the first byte."`
}

type rawLedger struct {
	Commit time.Duration `yaml:"commit" default:"30s" doc:"Longest time between a transfer and its being on disk, 1s to 1h; longer spares flash, on which it is 60s unless it is written."`
	Hourly time.Duration `yaml:"hourly" default:"14d" doc:"How long the bytes of each hour are kept, 1h to 100d."`
	Daily  time.Duration `yaml:"daily" default:"400d" doc:"How long the bytes of each day are kept, 1d to 4000d."`
}

type rawMetrics struct {
	PerUser int `yaml:"per_user" default:"0" min:"0" max:"10000" doc:"Users that get series of their own at most; 0 is none."`
}

type rawWebhook struct {
	URL        webURL      `yaml:"url" need:"its URL" doc:"Where events are posted, http or https."`
	On         []eventName `yaml:"on" need:"the events, as in on: [user.exhausted, outbound]" doc:"Events: a kind (flow, session, user, outbound, config, warning) or a single one, as in user.exhausted."`
	SecretFile absPath     `yaml:"secret_file" doc:"File that holds the secret that posts are signed with; without it they are not."`
}
