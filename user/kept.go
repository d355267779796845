package user

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// The ledger is the Keeper: definitions, numbers and promotions go through the same
// store as usage. What an edit changes is on disk, whole, before Save returns nil.

// nextKey is the key, in the bucket of numbers, of the first one that was never given
// away; the keys of the others are names, which are not empty.
const nextKey = ""

// Load gives what the store has.
func (l *Ledger) Load() (Kept, error) {
	k := Kept{Committed: l.opt.Store.LastCommit(), Names: make(map[string]flow.UserKey)}
	var failed []error
	each := func(b store.Bucket, what string, decode func(key string, value []byte) error) {
		l.opt.Store.Each(b, func(key string, value []byte) {
			if err := decode(key, value); err != nil {
				failed = append(failed, fmt.Errorf("stored %s %q: %w", what, key, err))
			}
		})
	}
	each(store.IDs, "number of", func(key string, value []byte) error {
		n, size := binary.Uvarint(value)
		switch {
		case size <= 0:
			return errBadRecord
		case key == nextKey:
			k.Next = flow.UserKey(n)
		default:
			k.Names[key] = flow.UserKey(n)
		}
		return nil
	})
	each(store.Groups, "group", func(_ string, value []byte) error {
		var g keptGroup
		if err := json.Unmarshal(value, &g); err != nil {
			return err
		}
		limits, err := g.Limits.limits()
		k.Groups = append(k.Groups, Group{Name: g.Name, Limits: limits, Source: FromStore})
		return err
	})
	each(store.Users, "user", func(_ string, value []byte) error {
		var u keptUser
		if err := json.Unmarshal(value, &u); err != nil {
			return err
		}
		s, err := u.spec()
		k.Users = append(k.Users, s)
		return err
	})
	each(store.Promotions, "promotion of", func(key string, value []byte) error {
		p, err := decodePromotion(key, value)
		k.Promotions = append(k.Promotions, p)
		return err
	})
	return k, errors.Join(failed...)
}

// Save keeps an edit, or nothing of it. It waits for the disk.
func (l *Ledger) Save(e *Edit) error {
	l.saving.Lock()
	defer l.saving.Unlock()
	var b store.Batch
	var failed []error
	set := b.Changes.Set
	define := func(bucket store.Bucket, key string, definition any) {
		value, err := json.Marshal(definition)
		if err != nil {
			failed = append(failed, fmt.Errorf("%q can't be written: %w", key, err))
		}
		set(bucket, key, value)
	}
	if e.Next != 0 {
		set(store.IDs, nextKey, binary.AppendUvarint(nil, uint64(e.Next)))
	}
	for name, key := range e.Names {
		set(store.IDs, name, binary.AppendUvarint(nil, uint64(key)))
	}
	for i := range e.Users {
		define(store.Users, number(e.Users[i].ID), keptUserOf(&e.Users[i]))
	}
	for i := range e.Groups {
		define(store.Groups, e.Groups[i].Name, keptGroup{e.Groups[i].Name, keptLimitsOf(&e.Groups[i].Limits)})
	}
	for i := range e.Promotions {
		p := &e.Promotions[i]
		define(store.Promotions, p.Device, keptPromotion{p.User, p.MAC, p.Since, p.Idle, p.Session})
	}
	for _, key := range e.DeleteUsers {
		set(store.Users, number(key), nil)
	}
	for _, name := range e.DeleteGroups {
		set(store.Groups, name, nil)
	}
	for _, device := range e.DeletePromotions {
		set(store.Promotions, device, nil)
	}
	if len(failed) > 0 {
		return errors.Join(failed...)
	}
	now := time.Now()
	if err := l.opt.Store.Write(b, now); err != nil || len(e.DeleteUsers) == 0 {
		return err
	}
	for _, key := range e.DeleteUsers {
		l.forget(key)
	}
	_ = l.flush(now) // a number is never given away again: what a crash leaves is nobody's
	return nil
}

func number(key flow.UserKey) string { return strconv.FormatUint(uint64(key), 10) }

// Commit observes usages and commits them with everything else that changed. It waits
// for the disk.
func (l *Ledger) Commit(at time.Time, usages iter.Seq2[flow.UserKey, Usage]) error {
	l.Observe(usages, at)
	return l.Flush(at)
}

// How definitions are written. The names are on disk: they stay as they are.

type keptUser struct {
	Name          string        `json:"name"`
	ID            flow.UserKey  `json:"id"`
	Group         string        `json:"group,omitzero"`
	Disabled      bool          `json:"disabled,omitzero"`
	Notes         string        `json:"notes,omitzero"`
	ExternalID    string        `json:"external_id,omitzero"`
	Limits        keptLimits    `json:"limits,omitzero"`
	ExpiresAt     time.Time     `json:"expires_at,omitzero"`
	AfterFirstUse time.Duration `json:"after_first_use,omitzero"`
	Devices       []string      `json:"devices,omitzero"`
}

type keptGroup struct {
	Name   string     `json:"name"`
	Limits keptLimits `json:"limits,omitzero"`
}

type keptLimits struct {
	Up            uint64  `json:"up,omitzero"`
	Down          uint64  `json:"down,omitzero"`
	Total         uint64  `json:"total,omitzero"`
	Every         Period  `json:"every,omitzero"` // 1 to 4: hour, day, week, month
	Day           int     `json:"day,omitzero"`
	Zone          string  `json:"zone,omitzero"`
	CarryOver     bool    `json:"carry_over,omitzero"`
	Multiplier    *uint64 `json:"multiplier,omitzero"` // millionths
	Speed         uint64  `json:"speed,omitzero"`
	BandwidthUp   uint64  `json:"bandwidth_up,omitzero"`
	BandwidthDown uint64  `json:"bandwidth_down,omitzero"`
	Connections   int     `json:"connections,omitzero"`
	IPs           int     `json:"ips,omitzero"`
	Block         bool    `json:"block,omitzero"`
	Throttle      uint64  `json:"throttle,omitzero"`
	Outbound      string  `json:"outbound,omitzero"`
}

type keptPromotion struct {
	User    flow.UserKey  `json:"user"`
	MAC     string        `json:"mac,omitzero"`
	Since   time.Time     `json:"since"`
	Idle    time.Duration `json:"idle,omitzero"`
	Session time.Duration `json:"session,omitzero"`
}

func keptUserOf(s *Spec) keptUser {
	return keptUser{
		Name: s.Name, ID: s.ID, Group: s.Group, Disabled: s.Disabled, Notes: s.Notes, ExternalID: s.ExternalID,
		Limits: keptLimitsOf(&s.Limits), ExpiresAt: s.Expires.At, AfterFirstUse: s.Expires.AfterFirstUse, Devices: s.Devices,
	}
}

func (u *keptUser) spec() (Spec, error) {
	limits, err := u.Limits.limits()
	return Spec{
		Name: u.Name, ID: u.ID, Group: u.Group, Disabled: u.Disabled, Notes: u.Notes, ExternalID: u.ExternalID,
		Limits: limits, Expires: Expires{At: u.ExpiresAt, AfterFirstUse: u.AfterFirstUse}, Devices: u.Devices, Source: FromStore,
	}, err
}

func decodePromotion(device string, value []byte) (Promotion, error) {
	var k keptPromotion
	err := json.Unmarshal(value, &k)
	return Promotion{Device: device, User: k.User, MAC: k.MAC, Since: k.Since, Idle: k.Idle, Session: k.Session}, err
}

func keptLimitsOf(l *Limits) keptLimits {
	k := keptLimits{
		Up: l.Traffic.Up, Down: l.Traffic.Down, Total: l.Traffic.Total,
		Every: l.Traffic.Reset.Every, Day: l.Traffic.Reset.Day, CarryOver: l.Traffic.Reset.CarryOver,
		Speed: l.Speed, BandwidthUp: l.Bandwidth.Up, BandwidthDown: l.Bandwidth.Down,
		Connections: l.Connections, IPs: l.IPs, Block: l.WhenExhausted.Block, Throttle: l.WhenExhausted.Throttle, Outbound: l.WhenExhausted.Outbound,
	}
	if l.Traffic.Reset.Zone != nil {
		k.Zone = l.Traffic.Reset.Zone.String()
	}
	if l.Multiplier.Set {
		k.Multiplier = &l.Multiplier.Millionths
	}
	return k
}

func (k *keptLimits) limits() (Limits, error) {
	l := Limits{
		Traffic: Traffic{k.Up, k.Down, k.Total, Reset{Every: k.Every, Day: k.Day, CarryOver: k.CarryOver}},
		Speed:   k.Speed, Bandwidth: Bandwidth{k.BandwidthUp, k.BandwidthDown},
		Connections: k.Connections, IPs: k.IPs, WhenExhausted: Exhausted{k.Block, k.Throttle, k.Outbound},
	}
	if k.Multiplier != nil {
		l.Multiplier = Multiplier{true, *k.Multiplier}
	}
	var err error
	if k.Zone != "" {
		l.Traffic.Reset.Zone, err = time.LoadLocation(k.Zone)
	}
	return l, err
}
