package api_test

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gatewayd/internal/api"
)

// document is what these tests read of the OpenAPI document.
type document struct {
	Paths      map[string]map[string]operation `json:"paths"`
	Components struct {
		Schemas map[string]struct {
			Properties map[string]any `json:"properties"`
		} `json:"schemas"`
	} `json:"components"`
}

type operation struct {
	ID         string `json:"operationId"`
	Role       string `json:"x-role"`
	Parameters []struct {
		Name string `json:"name"`
		In   string `json:"in"`
	} `json:"parameters"`
}

func readDocument(f *fixture) (d document) {
	_, body := f.ask("read", "GET", "/v1/openapi.json", nil)
	if err := json.Unmarshal([]byte(body), &d); err != nil {
		f.Fatal(err)
	}
	return d
}

func TestTheOpenAPIDocumentListsExactlyTheCallsThatExist(t *testing.T) {
	f := start(t, nil)
	listed, ids := map[string]operation{}, map[string]bool{}
	for path, methods := range readDocument(f).Paths {
		for method, op := range methods {
			listed[strings.ToUpper(method)+" "+path] = op
			if ids[op.ID] {
				t.Errorf("operation id %s twice", op.ID)
			}
			ids[op.ID] = true
		}
	}
	for call, role := range f.server.RouteTable() {
		op, ok := listed[call]
		if !ok {
			t.Errorf("%s is not in the document", call)
			continue
		}
		if op.Role != role {
			t.Errorf("%s: role %s in the document, %s in the table", call, op.Role, role)
		}
		var params []string
		for _, p := range op.Parameters {
			if p.In == "query" {
				params = append(params, p.Name)
			}
		}
		if known := f.server.RouteParams(call); !slices.Equal(slices.Sorted(slices.Values(params)), slices.Sorted(slices.Values(known))) {
			t.Errorf("%s: parameters %v in the document, %v in the table", call, params, known)
		}
		delete(listed, call)
	}
	for call := range listed {
		t.Errorf("%s does not exist", call)
	}
}

func TestTheOpenAPISchemasHaveTheFieldsOfTheTypes(t *testing.T) {
	f := start(t, nil)
	types := map[string]any{
		"Problem": api.Problem{}, "UserRef": api.UserRef{}, "Flow": api.Flow{}, "Session": api.Session{}, "Connections": api.Connections{},
		"ClosedFlows": api.ClosedFlows{}, "Closed": api.Closed{}, "Lagged": api.Lagged{}, "Stats": api.Stats{}, "UserStats": api.UserStats{},
		"Traffic": api.Traffic{}, "Inbound": api.Inbound{}, "Draining": api.Draining{}, "Outbound": api.Outbound{}, "Outbounds": api.Outbounds{},
		"Rule": api.Rule{}, "Rules": api.Rules{}, "Memory": api.Memory{}, "Ledger": api.Ledger{}, "FlowLog": api.FlowLog{}, "Status": api.Status{}, "Applied": api.Applied{},
		"UserSpec": api.UserSpec{}, "User": api.User{}, "UserList": api.UserList{}, "Group": api.Group{}, "Groups": api.Groups{}, "Limits": api.Limits{},
		"TrafficLimit": api.TrafficLimit{}, "Reset": api.Reset{}, "Bandwidth": api.Bandwidth{}, "Expires": api.Expires{}, "UserUsage": api.UserUsage{},
		"Left": api.Left{}, "TopUp": api.TopUp{}, "Extend": api.Extend{}, "Take": api.Take{}, "Ack": api.Ack{}, "Series": api.Series{},
		"UsagePoint": api.UsagePoint{}, "UsageOf": api.UsageOf{}, "UsageList": api.UsageList{}, "Device": api.Device{}, "DeviceList": api.DeviceList{},
		"Promotion": api.Promotion{}, "Me": api.Me{}, "MyUsage": api.MyUsage{}, "UserEvent": api.UserEvent{},
	}
	schemas := readDocument(f).Components.Schemas
	for name, v := range types {
		want := jsonFields(reflect.TypeOf(v))
		var got []string
		for field := range schemas[name].Properties {
			got = append(got, field)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v in the document, %v in the type", name, got, want)
		}
		delete(schemas, name)
	}
	for name := range schemas {
		t.Errorf("schema %s has no type", name)
	}
}

func jsonFields(t reflect.Type) (names []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			names = append(names, jsonFields(f.Type)...)
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}
